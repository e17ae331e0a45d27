"""The random model: the same weights from the same seed, and a tokenizer that the benchmark knows."""

from __future__ import annotations

import sys

from benchmarks import random_model
from benchmarks.multi_turn.writers import RecallWriter, writer_for

SMALL = ["--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--context", "64"]


def build(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["random_model", *SMALL, *arguments])
    random_model.main()


def test_weights_come_from_the_seed(tmp_path, monkeypatch):
    for name, seed in (("one", "5"), ("same", "5"), ("other", "6")):
        build(monkeypatch, "--output", str(tmp_path / name), "--seed", seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other")}
    assert weights["one"] == weights["same"] != weights["other"]
    assert isinstance(writer_for(str(tmp_path / "one")), RecallWriter)

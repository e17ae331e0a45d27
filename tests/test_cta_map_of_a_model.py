"""`python -m benchmarks.cta_map.one_model`."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks.cta_map import one_model
from sgl_ragged.attention.cta_map import METHODS, cta_counts, imbalance, makespan
from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_config, make_profile


@pytest.fixture
def model(tmp_path):
    return make_config(tmp_path)


def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["cta_map", "--profile", "uniform", *args])
    one_model.main()


def test_as_json(model, monkeypatch, capsys):
    profile = make_profile(model, model / "p.safetensors")
    flags = ["--model", str(model), "--ratio", "0.3", "--profile", str(model / "p.safetensors")]
    run(monkeypatch, *flags, "--batch", "8", "--sms", "10", "--ctas-per-sm", "4", "--json")
    report = json.loads(capsys.readouterr().out)
    kept = profile_kept(profile, 0.3, 256)
    assert (report["batch"], report["resident_ctas"], report["method"]) == (8, 40, "exact")
    assert [layer["kept"] for layer in report["layers"]] == kept.tolist()
    assert [layer["counts"] for layer in report["layers"]] == cta_counts(kept, 40, 8, "exact").tolist()
    assert set(report["methods"]) == set(METHODS)
    for method, found in report["methods"].items():
        counts = cta_counts(kept, 40, 8, method)
        assert found["imbalance_worst"] == imbalance(kept, counts).max()
        assert found["makespan_median"] == np.median(makespan(kept, counts, 8, 40))
        assert (found["ctas_min"], found["ctas_max"]) == (counts.sum(axis=1).min(), counts.sum(axis=1).max())


def test_as_a_table_and_a_plot(model, monkeypatch, capsys):
    plot = model / "loads.png"
    run(monkeypatch, "--model", str(model), "--plot", str(plot))
    shown = capsys.readouterr().out
    assert "batch 4 on 396 resident CTAs: a wave holds 99 per request" in shown
    for method in METHODS:
        assert method in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--batch", "0"), "--batch must be at least 1, not 0"),
        (("--sms", "-1"), "--sms must be at least 1, not -1"),
        (("--ctas-per-sm", "0"), "--ctas-per-sm must be at least 1, not 0"),
        (("--ratio", "0"), "outside (0, 1]"),
        (("--profile", "/nowhere"), "does not exist"),
        (("--profile", "bundled"), "no bundled profile fits"),
        (("--plot", "/nowhere/loads.png"), "cannot write /nowhere/loads.png"),
        (("--plot", "loads.what"), "cannot write loads.what"),
    ],
)
def test_bad_input_ends_with_one_line(model, monkeypatch, capsys, args, words):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--model", str(model), *args)
    assert words in str(ended.value.code)
    assert "\n" not in str(ended.value.code)
    assert capsys.readouterr().out == ""

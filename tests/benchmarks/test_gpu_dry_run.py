"""`benchmarks/gpu.py --dry-run`: runs with nothing but torch, triton and numpy; its figures against hand arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = ("sglang", "scipy", "safetensors", "rich", "matplotlib")


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict:
    """The results file of a run in which the packages of BLOCKED cannot be imported."""
    folder = tmp_path_factory.mktemp("dry")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    (folder / "sitecustomize.py").write_text(blocked + "\n")
    # As a user without the package installed would run it: only the script's own path setting finds the repository.
    finished = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--dry-run", "--output", str(folder / "out")],
        cwd=ROOT,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert "computed, not measured" in finished.stdout
    return json.loads((folder / "out" / "gpu.json").read_text())


def test_says_that_nothing_was_measured(dry):
    assert dry["kind"] == "computed, not measured"
    assert {block["status"] for block in dry["blocks"].values()} == {"computed, not measured"}


def test_decode_case_by_hand(dry):
    """Llama-3.1-8B, 32K, batch 4: 32,640 tokens, 127 sealed segments of 256 and 128 tokens in the tail."""
    row = next(row for row in dry["blocks"]["decode"]["rows"] if row["case"] == "Llama-3.1-8B, 32K, batch 4")
    assert (row["length"], row["sealed_segments"], row["tail_tokens"]) == (32_640, 127, 128)
    queries_and_output = 2 * 4 * 32 * 128 * 2
    # 4 KB per token and layer: 8 heads, K and V, 128 elements of 2 bytes.
    assert row["full"]["bytes_per_layer"] == 4 * 32_640 * 4096 + queries_and_output
    assert row["full"]["flop_per_layer"] == 4 * 32_640 * 4 * 32 * 128
    assert row["full"]["memory_floor_us"] == pytest.approx(row["full"]["bytes_per_layer"] / 4.3e6, abs=0.01)
    quarter = row["ratios"]["0.25"]
    # At ratio 0.25 the eight heads of a layer keep 8 * 64 tokens of a segment.
    assert [sum(heads) for heads in quarter["kept"]] == [512] * 4
    kept_rows = 127 * 512 + 8 * 128
    assert quarter["bytes_per_layer"] == 4 * kept_rows * 2 * 128 * 2 + queries_and_output
    assert quarter["cta_map"]["none"]["ctas_per_layer"] == [8] * 4
    assert quarter["cta_map"]["uniform"]["ctas_per_layer"] == [8 * (396 // 4 // 8)] * 4
    largest = [max(heads) / 64 for heads in quarter["kept"]]
    assert quarter["cta_map"]["none"]["largest_over_mean"] == pytest.approx(largest, abs=1e-3)
    assert row["ratios"]["1"]["bytes_per_layer"] == row["full"]["bytes_per_layer"]


def test_formats_by_hand(dry):
    """The same 512 of 2,048 rows of a segment in 196 bytes each, or as many as fit the bytes of 512 in bf16."""
    row = next(row for row in dry["blocks"]["formats"]["rows"] if row["case"] == "Llama-3.1-8B, 32K, batch 16")
    ratios, queries_and_output = row["ratios"], 2 * 16 * 32 * 128 * 2
    tokens = ratios["0.25 of the tokens in k8v4"]
    assert tokens["kept"] == ratios["0.25"]["kept"]
    assert tokens["bytes_per_layer"] == 16 * (127 * 512 * 196 + 8 * 128 * 512) + queries_and_output
    fp8 = ratios["0.25 of the tokens in fp8"]
    assert fp8["bytes_per_layer"] == 16 * (127 * 512 + 8 * 128) * 256 + queries_and_output
    for stored, row_bytes, header in (("k8v4", 196, 0), ("k6v4", 164, 512), ("int8", 260, 0), ("fp8", 256, 0)):
        kept = ratios[f"0.25 of the bytes in {stored}"]["kept"]
        # What layers keep is rounded to multiples of 16.
        assert [sum(heads) for heads in kept] == pytest.approx([(512 * 512 - 8 * header) / row_bytes] * 4, abs=16)
    tokens = ratios["0.25 of the tokens in k6v4"]
    assert tokens["bytes_per_layer"] == 16 * (127 * (512 * 164 + 8 * 512) + 8 * 128 * 512) + queries_and_output


def test_extend_case_by_hand(dry):
    """2,048 tokens after 32,768: every query sees all tokens before it, and itself."""
    row = next(r for r in dry["blocks"]["extend"]["rows"] if r["case"] == "Llama-3.1-8B, 1 x 2048 after 32K")
    pairs = sum(32_768 + i + 1 for i in range(2048))
    assert row["full"]["flop_per_layer"] == row["ratios"]["1"]["flop_per_layer"] == 4 * pairs * 32 * 128


def test_memory_decides_what_is_held_at_once(dry):
    extents = {row["case"]: row.get("extent") for row in dry["blocks"]["decode"]["rows"]}
    # 34 GB a layer and cache: three ratios and the full cache fit once, not four times.
    assert extents["Llama-3.1-8B, 128K, batch 64"]["layers"] == 1
    assert extents["Llama-3.1-8B, 32K, batch 4"]["layers"] == 4
    for extent in extents.values():
        assert extent["gb"] * 1e9 < 127 * 2**30

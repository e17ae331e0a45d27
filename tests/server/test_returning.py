"""The benchmark of conversations that come back finds each of them on its tier, on both pools."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.harness.results import Results
from benchmarks.multi_turn.returning.results import Returns
from benchmarks.multi_turn.returning.stages import TIERS_STAGE
from benchmarks.multi_turn.returning.visit import DEVICE, DISK, HOST, RECOMPUTED

pytestmark = pytest.mark.server

RETURNS = 2
SIZES = [
    *("--prompt-length", "700", "--segment", "64", "--conversations", "6", "--returns", str(RETURNS)),
    *("--kv-bytes", "8MiB", "--host-bytes", "48MiB"),
]


@pytest.mark.thorough
def test_every_tier_is_measured_on_both_pools(tmp_path):
    output = tmp_path / "return.json"
    command = [sys.executable, "-m", "benchmarks", "multi_turn", "--shape", "return", "--pools", "token,ragged@0.3"]
    run = subprocess.run([*command, *SIZES, "--output", str(output), "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = Returns.of(Results.load(output, "multi_turn.returning"))
    assert json.loads(run.stdout) == json.loads(output.read_text())
    assert found.strays() == []
    for variant in ("token", "ragged@0.3"):
        assert [len(found.counted(variant, cell)) for cell in (DEVICE, HOST, DISK, RECOMPUTED)] == [RETURNS] * 4
    restored = {one.stage: one.restored for one in found.servers if one.variant == "ragged@0.3"}
    segments = RETURNS * ((700 + 16 - 1) // 64)
    assert restored[TIERS_STAGE]["host"] + restored[TIERS_STAGE]["recomputed"] == segments
    assert restored[DISK]["storage"] == segments

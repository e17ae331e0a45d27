"""Random requests on pools too small for them; every answer is a quiet server's (benchmarks/storm/README.md)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from benchmarks.storm.features import chosen
from benchmarks.storm.material import Material
from benchmarks.storm.one_storm import Limits, run_storm
from tests.examples import fewer

pytestmark = [
    pytest.mark.server,
]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return Material(tmp_path_factory.mktemp("material"))


@pytest.mark.parametrize(
    "names",
    [("fit", "tier", "mixed-chunk", "lpm"), ("gemma3", "history", "lora", "odd-chunk", "dfs-weight")],
    ids="-".join,
)
def test_every_answer_is_a_quiet_servers(servers, material, tmp_path, names):
    limits = Limits(requests=fewer(200), seconds=60, compared=fewer(100), seed=0)
    outcome = run_storm(servers, chosen(names), material, limits, tmp_path / "storm.log")
    if len(outcome.problems) == 1 and outcome.problems[0].startswith("1 of "):
        # One answer may be a tie that no other shape of batch repeats; a fault shows in several, and again.
        limits = dataclasses.replace(limits, seed=1)
        outcome = run_storm(servers, chosen(names), material, limits, tmp_path / "again.log")
    print(outcome)
    assert outcome.problems == []
    assert outcome.ends["answered"] > limits.requests / 2
    assert set(outcome.ends) <= {"answered", "left", "aborted", "refused"}
    assert outcome.cached > 0
    assert outcome.compared >= limits.compared / 2


@pytest.mark.thorough
def test_all_pairs(tmp_path):
    """Half an hour on two cores."""
    command = [sys.executable, "-m", "benchmarks", "storm", "--pairs", "--no-narrow", "--requests", "120"]
    command += ["--compared", "90", "--output", str(tmp_path / "storm.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * 3600)
    assert done.returncode == 0, done.stderr[-3000:]

"""Prefill and decode by pool: how rounds become ratios, and what is refused."""

from __future__ import annotations

import socket

import pytest

from benchmarks import step_speed
from benchmarks.harness.results import Results
from benchmarks.step_speed import Phases, Spoilt, Taken, cpu_clock, drafts_table, summary


def test_ratios_are_of_the_same_round():
    times = {"decode": {"token": [10.0, 20.0, 40.0], "ragged@1": [20.0, 30.0, 20.0]}}
    base, ragged = summary(times)
    assert (base["median_ms"], base["ratio"]) == (20.0, 1.0)
    # 2, 1.5 and 0.5: not the ratio of the medians, which is 1.
    assert (ragged["median_ms"], ragged["ratio"], ragged["low"], ragged["high"]) == (20.0, 1.5, 0.5, 2.0)


def test_cpu_seconds_are_those_of_who_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        clock = cpu_clock(f"http://127.0.0.1:{server.getsockname()[1]}")
        before = clock()
        while clock() == before:
            sum(range(100_000))
    assert clock() > before


@pytest.fixture
def cached(monkeypatch):
    """A cache that has what it was sent before, less `cached.lost` tokens; one second passes for each token sent.

    accepted: drafts of each step.
    """

    class Cache:
        lost = 0
        accepted = 0
        sent: tuple[tuple[int, ...], ...] = ()

    def take(server, prompts, new):
        found = []
        for prompt in map(tuple, prompts):
            hits = [len(old) - Cache.lost for old in Cache.sent if prompt[: len(old)] == old]
            found.append(max([0, *hits]))
        Cache.sent += tuple(map(tuple, prompts))
        return Taken(
            float(sum(map(len, prompts)) + 3 * new), min(found), (new - 1) // Cache.accepted if Cache.accepted else 0
        )

    monkeypatch.setattr(step_speed, "take", take)
    return Cache


def test_what_is_timed(cached):
    phases = Phases(batch=2, context=100, extend_by=10, steps=5, seed=0)
    assert phases.prefill(None, 1) == {"prefill": 1000 * (100 + 3)}
    assert phases.extend(None, 1) == {"extend": 1000 * (110 + 3)}
    # Two runs of the same batch differ by its steps alone.
    assert phases.decode(None, 1) == {"decode": 1000 * 3}


def test_steps_that_verify_are_timed(cached):
    cached.accepted = 4
    phases = Phases(batch=2, context=100, extend_by=10, steps=8, seed=0)
    assert phases.decode(None, 1) == {"decode": 1000 * 3, "verify": 1000 * 3 * 4}


def test_drafts_are_told_by_step_and_by_token(tmp_path):
    times = {"decode": {"token": [5.0], "ragged@1+draft=4": [4.0]}, "verify": {"token": [], "ragged@1+draft=4": [10.0]}}
    results = Results(tmp_path / "s.json", "step_speed", {"batch": 8}, {}, {"ms": times})
    assert list(map(tuple, drafts_table(results).rows)) == [("ragged@1+draft=4", "100.0", "2000.0", "2.5")]
    assert [row["pool"] for row in summary(times)] == ["token", "ragged@1+draft=4", "ragged@1+draft=4"]
    results.entries["ms"] = {"decode": {"token": [5.0]}}
    assert not drafts_table(results).rows


def test_a_phase_that_does_not_meet_its_cache_is_refused(cached):
    phases = Phases(batch=2, context=100, extend_by=10, steps=5, seed=0)
    phases.prefill(None, 1)
    with pytest.raises(Spoilt, match="never sent before"):
        phases.prefill(None, 1)
    cached.lost = 60
    with pytest.raises(Spoilt, match="only 40 of 100"):
        phases.extend(None, 1)
    with pytest.raises(Spoilt, match="only 40 of 100"):
        phases.decode(None, 1)

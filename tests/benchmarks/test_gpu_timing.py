"""The device timer's turns and arithmetic, on a GPU that is made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_blocks.timing import DeviceTimer


@pytest.fixture
def clock(monkeypatch):
    """A device on which time passes when `clock.run(name, us)` is called."""
    clock = SimpleNamespace(now=0.0, log=[])

    def run(name: str, us: float) -> None:
        clock.now += us / 1e3
        clock.log.append(name)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    class Graph:
        call = None

        def replay(self) -> None:
            self.call()

    @contextlib.contextmanager
    def capture(graph):
        before = len(clock.log)
        yield
        # What is called in a capture is recorded, not run.
        recorded, clock.log[before:] = clock.log[before:], []
        graph.call = lambda: [run(*entry) for entry in recorded]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    clock.run = run
    return clock


def test_variants_take_turns_and_times_are_of_one_call(clock):
    timer = DeviceTimer(rounds=3, round_ms=1.0)
    replays = {
        "four calls": lambda: clock.run("a", 400.0),
        "one call": lambda: clock.run("b", 250.0),
    }
    times = timer.compare(replays, {"four calls": 4})
    assert times["four calls"].rounds == pytest.approx([100.0] * 3)
    assert times["one call"].median == pytest.approx(250.0)
    # Two to see how long a replay takes, then turns of about a millisecond.
    assert "".join(clock.log) == "aa" + "bb" + ("aa" + "bbbb") * 3
    assert times["one call"].summary() == {"median_us": 250.0, "min_us": 250.0, "max_us": 250.0, "rounds": 3}


def test_a_call_is_captured_after_it_has_run(clock):
    replay = DeviceTimer().prepare(lambda: clock.log.append(("kernel", 5.0)))
    assert clock.log == [("kernel", 5.0)] * 2
    replay()
    assert clock.log[2:] == ["kernel"]
    assert clock.now == pytest.approx(5e-3)

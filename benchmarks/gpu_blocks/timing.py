"""How long calls take: CUDA graphs replayed between events, variants in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: one entry a round, in the order of the rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def summary(self) -> dict[str, float | int]:
        return {
            "median_us": round(self.median, 3),
            "min_us": round(min(self.rounds), 3),
            "max_us": round(max(self.rounds), 3),
            "rounds": len(self.rounds),
        }


class DeviceTimer:
    """Times on a GPU. What is timed is captured in a graph first: no gaps between launches, as in a server's decode.

    Args:
        rounds: how often each variant has its turn. round_ms: about how long a turn is.
    """

    def __init__(self, rounds: int = 7, round_ms: float = 8.0) -> None:
        self.rounds, self.round_ms = rounds, round_ms

    def prepare(self, call: Call) -> Call:
        """Capture the call: what it allocates lives as long as the returned replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def compare(self, prepared: Mapping[str, Call], divisors: Mapping[str, int] | None = None) -> dict[str, Times]:
        """Time what `prepare` returned, in turns A B A B.

        Args:
            divisors: how many calls each variant makes; its times are of one of them.
        """
        repeats = {}
        for name, replay in prepared.items():
            once = self._milliseconds(replay, 1)
            once = min(once, self._milliseconds(replay, 1))
            repeats[name] = max(1, min(100, round(self.round_ms / max(once, 1e-3))))
        taken: dict[str, list[float]] = {name: [] for name in prepared}
        for _ in range(self.rounds):
            for name, replay in prepared.items():
                taken[name].append(1e3 * self._milliseconds(replay, repeats[name]) / repeats[name])
        return _divided(taken, divisors)

    def _milliseconds(self, replay: Call, repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


class HostTimer:
    """The same by the host's clock and without graphs: one round, to run the code where there is no GPU."""

    def prepare(self, call: Call) -> Call:
        return call

    def compare(self, prepared: Mapping[str, Call], divisors: Mapping[str, int] | None = None) -> dict[str, Times]:
        taken = {}
        for name, call in prepared.items():
            started = time.perf_counter()
            call()
            taken[name] = [1e6 * (time.perf_counter() - started)]
        return _divided(taken, divisors)


Timer = DeviceTimer | HostTimer


def _divided(taken: Mapping[str, list[float]], divisors: Mapping[str, int] | None) -> dict[str, Times]:
    calls = divisors or {}
    return {name: Times(tuple(us / calls.get(name, 1) for us in values)) for name, values in taken.items()}


def host_us(call: Call, repeats: int = 50) -> Times:
    """Wall microseconds of the host in a call that does not wait for the device; the device's work is not in it."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - started))
    return Times(tuple(taken))

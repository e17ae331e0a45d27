"""Counts of segments and bytes that come back from the host tier, and durations of work on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.cache_controller import device_module

from sgl_ragged.features.host_tier.restore_schedule import Rate

HOST, STORAGE, RECOMPUTED = "host", "storage", "recomputed"
"""Ways in which a segment comes back: copied from the host to the pool, read from storage to the host before that copy,
or computed again although the host has it."""


class TierMeter:
    """Segments and bytes by the way in which they came back.

    Args:
        segment: tokens per segment.
        row_bytes: bytes of a segment in the tier.
    """

    def __init__(self, segment: int, row_bytes: int) -> None:
        self._segment = segment
        self._row_bytes = row_bytes
        self.segments = dict.fromkeys((HOST, STORAGE, RECOMPUTED), 0)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that were copied from the host and read from storage."""
        return {way: self.segments[way] * self._row_bytes for way in (HOST, STORAGE)}

    def count(self, way: str, tokens: int) -> None:
        """Count the segments of `tokens` tokens that came back in a way."""
        self.segments[way] += tokens // self._segment


class Stopwatch:
    """Measure of durations: added to a rate at once on a CPU, and on a GPU at a later call, after the work has ended.

    Args:
        rate: mean of the measurements.
        on_cpu: True if work has ended when its call returns.
    """

    def __init__(self, rate: Rate, on_cpu: bool) -> None:
        self.rate = rate
        self._on_cpu = on_cpu
        self._open: list[tuple[Any, Any, float]] = []

    @contextlib.contextmanager
    def measuring(self, segments: float) -> Iterator[None]:
        """Measure work on `segments` segments, on the current stream."""
        if self._on_cpu:
            began = time.perf_counter()
            yield
            self.rate.add(segments, time.perf_counter() - began)
            return
        start, end = (device_module.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self.add_events(start, end, segments)

    def add_events(self, start: Any, end: Any, segments: float) -> None:
        """Register GPU work between two events; add the durations of all registered work that has ended."""
        self._open.append((start, end, segments))
        ended = [one for one in self._open if one[1].query()]
        self._open = [one for one in self._open if one not in ended]
        for first, last, count in ended:
            self.rate.add(count, first.elapsed_time(last) / 1e3)

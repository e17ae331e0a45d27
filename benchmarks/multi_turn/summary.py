"""Repeated points together: the median over the runs that count, and their range."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.multi_turn.measures import Figures, figures, itl_by_part, peak_bytes, rounds
from benchmarks.multi_turn.point import Point


@dataclass(frozen=True)
class MedianRange:
    """Median, least and greatest, mostly of runs; NaN where none has a value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MedianRange:
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(*[float("nan")] * 3)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Cell:
    """All runs of one pool with one number of clients: those that count, and why others do not."""

    pool: str
    clients: int
    points: tuple[Point, ...]
    rejected: tuple[str, ...]

    def total(self, value: Callable[[Figures], float]) -> MedianRange:
        """A figure of the whole run, over the runs."""
        return MedianRange.of([value(figures(point.answers, point.samples)) for point in self.points])

    def by_round(self, value: Callable[[Figures], float]) -> dict[int, MedianRange]:
        """A figure of each round, over the runs."""
        each = [rounds(point) for point in self.points]
        numbers = sorted({number for one in each for number in one})
        return {n: MedianRange.of([value(one[n]) for one in each if n in one]) for n in numbers}

    def itl_by_part(self) -> list[MedianRange]:
        """Median milliseconds between tokens in each part of the answers, over the runs."""
        each = [itl_by_part(point.answers) for point in self.points]
        return [MedianRange.of(part) for part in zip(*each, strict=True)]

    @property
    def virtual_tokens(self) -> int:
        return self.points[0].virtual_tokens

    @property
    def kv_bytes(self) -> int:
        return self.points[0].kv_bytes

    @property
    def peak_bytes(self) -> int:
        return max(peak_bytes(point) for point in self.points)


def cells(points: Sequence[Point]) -> list[Cell]:
    """One cell for each number of clients and pool, in the order in which they were first measured."""
    keys = dict.fromkeys((point.key.clients, point.key.pool) for point in points)
    made = []
    for clients, pool in sorted(keys, key=lambda key: key[0]):
        own = [point for point in points if (point.key.clients, point.key.pool) == (clients, pool)]
        counted = tuple(point for point in own if point.rejected is None)
        reasons = tuple(f"run {point.key.repeat + 1}: {point.rejected}" for point in own if point.rejected is not None)
        made.append(Cell(pool, clients, counted, reasons))
    return made

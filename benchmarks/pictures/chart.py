"""Axes of charts: a linear or logarithmic scale per direction, grid lines, series, and labels at their ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import Drawing


@dataclass(frozen=True)
class Scale:
    """Map values between `low` and `high` to pixels between `start` and `end`.

    ticks: values with a grid line, and their labels. log: the scale is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value.

        Raises:
            ValueError: the value is outside of the scale, so the picture would not show it.
        """
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is outside of the scale from {self.low} to {self.high}")
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)


@dataclass(frozen=True)
class Axes:
    """One panel of a chart: grid lines and labels of its ticks, then series on top."""

    drawing: Drawing
    x: Scale
    y: Scale

    def grid(self, title: str, x_title: str) -> None:
        """Draw grid lines and tick labels. title: above the panel, what the y axis shows."""
        for value, label in self.y.ticks:
            self.drawing.line(self.x.start, self.y(value), self.x.end, self.y(value), "rule", 1)
            self.drawing.text(self.x.start - 8, self.y(value) + 4, label, 12, "soft", "end")
        for value, label in self.x.ticks:
            self.drawing.line(self.x(value), self.y.start, self.x(value), self.y.start + 4, "soft", 1)
            self.drawing.text(self.x(value), self.y.start + 19, label, 12, "soft", "middle")
        self.drawing.line(self.x.start, self.y.start, self.x.end, self.y.start, "soft", 1)
        self.drawing.text(self.x.start - 30, self.y.end - 18, title, 13, bold=True)
        self.drawing.text((self.x.start + self.x.end) / 2, self.y.start + 38, x_title, 12, "soft", "middle")

    def series(
        self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False, hollow: bool = False
    ) -> None:
        """Draw points, joined in the order given. hollow: markers are rings."""
        places = [(self.x(x), self.y(y)) for x, y in points]
        if len(places) > 1:
            self.drawing.path(places, colour, 2, dashed)
        for x, y in places:
            self.drawing.circle(x, y, 4, None if hollow else colour, colour)

    def label(
        self, point: tuple[float, float], words: str, colour: str, dx: float = 9, dy: float = 4, anchor: str = "start"
    ) -> None:
        """Write a series' name next to one of its points."""
        self.drawing.text(self.x(point[0]) + dx, self.y(point[1]) + dy, words, 12, colour, anchor, bold=True)


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale around the values, with ticks at 1, 2 and 5 times powers of ten."""
    found = sorted(values)
    powers = range(math.floor(math.log10(found[0])) - 1, math.ceil(math.log10(found[-1])) + 1)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    low = max(step for step in steps if step <= found[0])
    high = min(step for step in steps if step >= found[-1])
    return Scale(low, high, start, end, [(step, f"{step:,g}") for step in steps if low <= step <= high], log=True)


def ticks(values: Sequence[float], form: str = "g") -> list[tuple[float, str]]:
    """Return ticks at these values, labelled with a format specification."""
    return [(value, format(value, form)) for value in values]

"""Progress of a calibration: bars in a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY_S = 30.0
"""Seconds between lines in a log file."""


@dataclass
class Step:
    """A step with a known number of items, such as samples or layers.

    Args:
        began: time of the clock at its start, in seconds.
    """

    name: str
    total: int
    began: float
    done: int = 0

    def line(self, now: float) -> str:
        """Format the line for a log file at time `now` of the clock, in seconds."""
        passed = now - self.began
        rest = f"about {_duration(passed / self.done * (self.total - self.done))} left" if self.done else "rest unknown"
        return f"calib: {self.name}: {self.done} of {self.total}, {_duration(passed)} elapsed, {rest}"


class PlainLines:
    """Writes progress as a line every `every_s` seconds, also while a step does not advance. Context manager."""

    def __init__(self, out: TextIO, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._every_s, self._clock = out, every_s, clock
        self._step: Step | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def start(self, name: str, total: int) -> Callable[[], None]:
        """Begin a step of `total` items. Return a function to call after each item."""
        step = self._step = Step(name, total, self._clock())

        def advance() -> None:
            step.done += 1

        return advance

    def write_line(self) -> None:
        """Write the line of the current step, if a step has begun and is not done."""
        step = self._step
        if step is not None and step.done < step.total:
            print(step.line(self._clock()), file=self._out, flush=True)

    def _write_lines(self) -> None:
        while not self._ended.wait(self._every_s):
            self.write_line()

    def __enter__(self) -> PlainLines:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()


class Bars:
    """Shows progress as bars in a terminal. Context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)

    def start(self, name: str, total: int) -> Callable[[], None]:
        """Begin a step of `total` items. Return a function to call after each item."""
        task = self._progress.add_task(name, total=total)
        return lambda: self._progress.advance(task)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def show_progress() -> Bars | PlainLines:
    """Make the progress display on standard error: bars if it is a terminal, else plain lines."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else PlainLines(sys.stderr)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"

"""What the fake device is asked to do, in the order in which it is asked."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = str(ROOT / "sgl_ragged")

COUNTED = ("triton", "other", "to_device", "to_host", "wait", "allocation")
"""Kinds of events that are counted: launches of Triton's kernels and of others, copies, waits for the device, memory
that is taken while a graph is captured."""

FAULTS = ("mix", "capture", "variant", "freed", "error")
"""Kinds that should not be there at all: host tensors among those of the device, what a capture forbids, kernels that
the warm-up has not compiled, buffers that a graph still reads, exceptions."""


@dataclass(frozen=True)
class Event:
    """at: file and line of the project, or of SGLang, that asked. layer: None outside of layers."""

    kind: str
    name: str
    at: str
    layer: int | None
    count: int = 1
    note: str = ""


@dataclass
class Recorder:
    """serving: start-up is over, so nothing may be compiled any more. compiled: keys of kernels that have been."""

    phases: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    phase: str = "start-up"
    layer: int | None = None
    serving: bool = False
    capturing: bool = False
    compiled: dict[tuple, None] = field(default_factory=dict)
    launches: list[tuple[str, tuple]] = field(default_factory=list)
    _quiet: int = 0

    @property
    def listens(self) -> bool:
        return self._quiet == 0

    def add(self, kind: str, name: str, count: int = 1, note: str = "") -> None:
        if self._quiet:
            return
        at = _asked_at()
        self.phases[self.phase].append(Event(kind, name, at, self.layer, count, note))
        if self.capturing and kind in ("wait", "mix", "to_device", "to_host"):
            self.phases[self.phase].append(Event("capture", f"{kind} {name}", at, self.layer))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What the harness does itself is not recorded."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def counts(self, phase: str, layers: int) -> dict[str, list[float]]:
        """By kind what happened once in a phase, and per layer, for kinds that happened at all."""
        found: dict[str, list[float]] = {}
        for kind in COUNTED:
            once, layered = (
                sum(e.count for e in self.phases[phase] if e.kind == kind and (e.layer is not None) == inside)
                for inside in (False, True)
            )
            if once or layered:
                found[kind] = [once, round(layered / layers, 2)]
        return found

    def faults(self, phase: str) -> dict[str, int]:
        """What should not have happened in a phase, and how often."""
        found: Counter[str] = Counter()
        for event in self.phases[phase]:
            if event.kind in FAULTS:
                found[f"{event.kind}: {event.name} {event.note} ({event.at.rsplit(':', 1)[0]})"] += event.count
        return dict(sorted(found.items()))


REC = Recorder()


def _asked_at() -> str:
    frame, fallback = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            return f"{Path(name).relative_to(OWN)}:{frame.f_lineno}"
        if not fallback and "/sglang/" in name:
            fallback = f"sglang/{name.split('/sglang/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback or "harness:0"

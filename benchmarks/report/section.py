"""The sections of a report."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.rows import Rows

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Figure:
    """An image file and what it shows."""

    path: Path
    caption: str

    @property
    def data_uri(self) -> str:
        """The image itself, so that a page needs no other file."""
        content = base64.b64encode(self.path.read_bytes()).decode()
        return f"data:{_TYPES[self.path.suffix]};base64,{content}"


@dataclass(frozen=True)
class Section:
    """One result: what it is, how it was made, its tables and figures.

    Attributes:
        text: paragraphs.
        command: how it is made again; empty if there is no single one.
        facts: machine, date and so on, as (name, value).
        missing: why there is nothing to show, empty otherwise.
    """

    title: str
    text: tuple[str, ...] = ()
    command: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Rows, ...] = ()
    figures: tuple[Figure, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = field(default=())

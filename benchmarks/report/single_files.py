"""Sections for the results that are one JSON file each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.rows import Rows
from benchmarks.report.kinds import KINDS, STEP_SPEED, Kind
from benchmarks.report.section import Figure, Section

OTHERS = "Files of no kind"
"""Title of the section for files that no kind has a pattern for."""


def sections(results: Path) -> list[Section]:
    """All kinds in a fixed order, the files of the README's table first, then those of no kind.

    The section of a kind without a readable file says so.
    """
    taken: set[Path] = set()
    made = []
    for kind in KINDS:
        paths = [path for path in _paths(results, kind) if path not in taken]
        taken.update(paths)
        made.append(_section(results, kind, paths))
    others = sorted(path.name for path in results.glob("*.json") if path not in taken)
    if others:
        made.append(Section(OTHERS, text=("Not shown here: " + ", ".join(others) + ".",)))
    return made


def step_speed(results: Path) -> Section:
    """What a prefill and a decode step cost."""
    return _section(results, STEP_SPEED, _paths(results, STEP_SPEED))


def _paths(results: Path, kind: Kind) -> list[Path]:
    """In the order of the patterns."""
    return list(dict.fromkeys(path for pattern in kind.patterns for path in sorted(results.glob(pattern))))


def _section(results: Path, kind: Kind, paths: Sequence[Path]) -> Section:
    """One section for all files of a kind, with the plots beside them."""
    if not paths:
        missing = ", ".join(f"{results.name}/{pattern}" for pattern in kind.patterns)
        return Section(kind.title, command=kind.command, missing=f"{missing}: no such file")
    made: list[Rows] = []
    broken: list[str] = []
    for path in paths:
        try:
            made += kind.tables(path, json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            broken.append(f"{path.name} cannot be read: {type(error).__name__} {error}")
    figures = [
        Figure(image, f"The table {path.stem} as a plot.")
        for path in paths
        for image in (path.with_suffix(".png"), path.with_suffix(".svg"))
        if image.is_file()
    ]
    text = f"{kind.text} Files: {', '.join(path.name for path in paths)}."
    return Section(kind.title, (text,), kind.command, tables=tuple(made), figures=tuple(figures), notes=tuple(broken))

"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: the first to the left, the others to the right; floats with three significant digits."""
    cells = [list(columns), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(["", title, lines[0], "-" * len(lines[0]), *lines[1:]])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print at once: output that a pipe buffers is lost when the run is interrupted."""
    print(table(title, columns, rows), flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)

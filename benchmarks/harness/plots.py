"""Plots as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sgl_ragged.errors import RaggedConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure; raises RaggedConfigError if the file cannot be written or its suffix names no image format."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RaggedConfigError(f"cannot write {path}: {error}") from None

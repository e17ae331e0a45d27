"""Plots as files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_ragged.errors import RaggedConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def drawn(path: Path, size: tuple[float, float], columns: int = 1) -> Iterator[Any]:
    """The axes of a new figure, an array where there are several, which is written when the block ends.

    `size`: inches. Raises RaggedConfigError as `save_plot` does.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
    try:
        yield axes
        save_plot(figure, path)
    finally:
        pyplot.close(figure)


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure; raises RaggedConfigError if the file cannot be written or its suffix names no image format."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RaggedConfigError(f"cannot write {path}: {error}") from None

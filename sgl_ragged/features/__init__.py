"""Features of a server, each with a half for the launcher (`launch.py`) and a half for workers (`serve.py`)."""

from __future__ import annotations

import functools
import importlib.metadata
import pkgutil
from typing import Any

from sgl_ragged.errors import RaggedConfigError

ROOMS = ("retrieval", "history", "windows", "drafts", "disaggregation", "host_tier")
"""Folders of this package in the order in which features join. Features of other packages join before the last: a host
tier names its rows by all that has joined."""


@functools.cache
def load_halves(half: str) -> tuple[Any, ...]:
    """Return one half of all features, in the order in which they join.

    Args:
        half: "launch" or "serve": the module in each of ROOMS whose `FEATURE` it is. Other packages bring theirs as
            entry points of the group `sgl_ragged.launch_features` or `sgl_ragged.serve_features`.

    Raises:
        RaggedConfigError: a feature of another package cannot be loaded.
    """
    own = [pkgutil.resolve_name(f"{__name__}.{room}.{half}:FEATURE") for room in ROOMS]
    others = []
    for entry in importlib.metadata.entry_points(group=f"sgl_ragged.{half}_features"):
        try:
            others.append(entry.load())
        except Exception as error:
            raise RaggedConfigError(
                f"feature {entry.name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}; remove its "
                f"package, or mend it"
            ) from error
    return (*own[:-1], *others, own[-1])

"""What --ragged-reservoir and the flags beside it mean for a server, and what they do not go with."""

from __future__ import annotations

from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.options import RaggedOptions, dashed
from sgl_ragged.retrieval.settings import Retrieval
from sgl_ragged.retrieval.sglang_feature import RETRIEVAL

DEFAULTS: dict[str, Any] = {"overlay": 128, "pivots": 2, "watch_interval": 8, "drift": 0.5}
"""By field of `RaggedOptions`."""


def plan_retrieval(options: RaggedOptions) -> Retrieval | None:
    """What was asked for. Raises RaggedConfigError for flags that do not go with it."""
    given = {name: getattr(options, name) for name in DEFAULTS if getattr(options, name) is not None}
    if options.reservoir is None:
        if given:
            flags = ", ".join(dashed(f"ragged_{name}") for name in given)
            raise RaggedConfigError(
                f"{flags}: these are about fetching what heads dropped, which needs host memory; add "
                f"--ragged-reservoir, or drop them"
            )
        return None
    RETRIEVAL.require()
    chosen = DEFAULTS | given
    return Retrieval(
        reservoir_bytes=options.reservoir,
        overlay=chosen["overlay"],
        pivots=chosen["pivots"],
        interval=chosen["watch_interval"],
        drift=chosen["drift"],
    )

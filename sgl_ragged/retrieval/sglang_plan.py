"""What --ragged-reservoir and the flags beside it mean for a server, and what they do not go with."""

from __future__ import annotations

from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.options import RaggedOptions, dashed
from sgl_ragged.plugin.seams import RETRIEVAL_SEAMS, check_seams
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.retrieval.settings import Retrieval

DEFAULTS: dict[str, Any] = {"overlay": 128, "pivots": 2, "watch_interval": 8, "drift": 0.5}
"""By field of `RaggedOptions`."""


def plan_retrieval(server_args: Any, options: RaggedOptions) -> Retrieval | None:
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
    check_seams(RETRIEVAL_SEAMS, " with --ragged-reservoir")
    for asked, reason in (
        (options.history is not None, "--ragged-history frees segments that would have to be watched"),
        (
            server_args.enable_hierarchical_cache,
            "--enable-hierarchical-cache brings segments back without what heads dropped of them",
        ),
        (server_args.radix_cache_backend, "--radix-cache-backend takes the place of a radix cache that it needs"),
        (server_args.enable_mixed_chunk, "--enable-mixed-chunk decodes within prefill, where pivots do not look"),
        (options.fairkv == "split", "--ragged-fairkv split stores heads in parts, and pivots watch as a whole"),
        (options.kernel == "flashinfer", "--ragged-kernel flashinfer plans without overlays; use triton"),
    ):
        if asked:
            raise RaggedConfigError(f"--ragged-reservoir is not supported: {reason}; drop one of the two")
    chosen = DEFAULTS | given
    return Retrieval(
        reservoir_bytes=options.reservoir,
        overlay=chosen["overlay"],
        pivots=chosen["pivots"],
        interval=chosen["watch_interval"],
        drift=chosen["drift"],
    )


def refuse_shape(retrieval: Retrieval | None, geometry: ModelGeometry, ranks: int) -> None:
    """Raise RaggedConfigError for retrieval with sliding windows, or with more ranks than heads."""
    if retrieval is None:
        return
    if ranks > geometry.num_heads:
        raise RaggedConfigError(
            f"--ragged-reservoir is not supported with --tp {ranks}: a rank would have only some of the queries of a "
            f"pivot, of {geometry.num_heads} heads; use at most {geometry.num_heads} ranks"
        )
    if geometry.windowed is not None:
        raise RaggedConfigError(
            "--ragged-reservoir is not supported for models with sliding-window layers: their radix cache shares pages "
            "by windows, too; drop it"
        )

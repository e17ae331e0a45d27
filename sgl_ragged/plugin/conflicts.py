"""What does not go together: one table, from which refusals are raised and docs/conflicts.md is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import is_fp8
from sgl_ragged.plan import CODEC_NAMES
from sgl_ragged.plugin.model_support import model_geometry
from sgl_ragged.plugin.multimodal import counts_pictures
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.plugin.seams import features

if TYPE_CHECKING:
    import torch

    from sgl_ragged.profiles.geometry import ModelGeometry

REFUSED = "the server does not start"
STAYS_WIDE = "`auto` stays `wide`; a format that was asked for is refused"
STAYS_UNFITTED = "served unfitted, and the log says why"


@dataclass(frozen=True)
class Launch:
    """What is known of a start; flags alone, before SGLang has read the model.

    server_args: SGLang's settings, as they were asked for. model: its ModelConfig. kv_dtype: of the cache.
    """

    options: RaggedOptions
    server_args: Any
    model: Any = None
    kv_dtype: torch.dtype | None = None

    @property
    def geometry(self) -> ModelGeometry | None:
        return None if self.model is None else model_geometry(self.model)


HISTORY, RESERVOIR, TIER = "--ragged-history", "--ragged-reservoir", "--enable-hierarchical-cache"
SPLIT, FLASHINFER, CODEC = "--ragged-fairkv split", "--ragged-kernel flashinfer", "--ragged-host-codec fp8 or shared"
TREE, MIXED, ONE_POOL = "--radix-cache-backend", "--enable-mixed-chunk", "--disable-hybrid-swa-memory"
WINDOWS, SINKS, M_ROPE = "sliding-window layers", "learned sinks", "three positions per token (M-RoPE)"
MANY_RANKS, FP8, CODES, FITTED = "more ranks than heads", "an FP8 cache", "slabs in 8, 6 and 4 bits", "fitted slabs"

CASES: dict[str, Callable[[Launch], bool]] = {
    HISTORY: lambda launch: launch.options.history is not None,
    RESERVOIR: lambda launch: launch.options.reservoir is not None,
    TIER: lambda launch: launch.server_args.enable_hierarchical_cache,
    SPLIT: lambda launch: launch.options.fairkv == "split",
    FLASHINFER: lambda launch: launch.options.kernel == "flashinfer",
    CODEC: lambda launch: launch.options.host_codec not in (None, CODEC_NAMES[0]),
    TREE: lambda launch: launch.server_args.radix_cache_backend not in (None, "", *_own_trees()),
    MIXED: lambda launch: launch.server_args.enable_mixed_chunk,
    ONE_POOL: lambda launch: launch.server_args.disable_hybrid_swa_memory,
    WINDOWS: lambda launch: launch.geometry is not None and launch.geometry.windowed is not None,
    SINKS: lambda launch: launch.model is not None and launch.model.has_attention_sinks,
    M_ROPE: lambda launch: launch.model is not None and counts_pictures(launch.model.hf_text_config),
    MANY_RANKS: lambda launch: launch.geometry is not None and launch.server_args.tp_size > launch.geometry.num_heads,
    FP8: lambda launch: launch.kv_dtype is not None and is_fp8(launch.kv_dtype),
}
"""Features, options and properties of models, and how it is seen that a start has them.

Codes and fitting are what a server does by itself where nothing speaks against it: they are asked about by name.
"""


def _own_trees() -> list[str]:
    return [feature.radix_cache[0] for feature in features() if feature.radix_cache is not None]


@dataclass(frozen=True)
class Conflict:
    """one, other: keys of CASES, or CODES or FITTED first. why: one clause. advice: what to do instead.

    effect: one of REFUSED, STAYS_WIDE, STAYS_UNFITTED.
    """

    one: str
    other: str
    why: str
    advice: str = "drop one of the two"
    effect: str = REFUSED


CONFLICTS = (
    Conflict(RESERVOIR, HISTORY, "it frees segments that would have to be watched"),
    Conflict(RESERVOIR, TIER, "it brings segments back without what heads dropped of them"),
    Conflict(RESERVOIR, TREE, "it takes the place of a radix cache that is needed"),
    Conflict(RESERVOIR, MIXED, "it decodes within prefill, where pivots do not look"),
    Conflict(RESERVOIR, SPLIT, "it stores heads in parts, and pivots watch as a whole"),
    Conflict(RESERVOIR, FLASHINFER, "flashinfer plans without overlays", "use triton"),
    Conflict(RESERVOIR, WINDOWS, "their radix cache shares pages by windows, too", "drop it"),
    Conflict(RESERVOIR, MANY_RANKS, "a rank would have only some of the queries of a pivot", "use as many as heads"),
    Conflict(HISTORY, TREE, "histories have a radix cache of their own", "drop --radix-cache-backend"),
    Conflict(HISTORY, MIXED, "it decodes within prefill, where histories do not look"),
    Conflict(TIER, WINDOWS, "pages of windows are not copied to the host", "drop it"),
    Conflict(ONE_POOL, WINDOWS, "it keeps everything of them, and slabs are for other layers", "drop it"),
    Conflict(SPLIT, WINDOWS, "it changes the number of heads of all layers, and these keep theirs", "use permute"),
    Conflict(SPLIT, FLASHINFER, "flashinfer attends to whole heads", "use triton, or --ragged-fairkv permute"),
    Conflict(FLASHINFER, SINKS, "flashinfer does not know them", "use --ragged-kernel triton"),
    Conflict(CODES, FLASHINFER, "FlashInfer reads numbers, no codes", "use --ragged-kernel triton", STAYS_WIDE),
    Conflict(
        CODES, FP8, "what is FP8 in tails would be rounded twice", "use wide, or --kv-cache-dtype auto", STAYS_WIDE
    ),
    Conflict(CODES, RESERVOIR, "pivots of --ragged-reservoir read keys as numbers", "use wide", STAYS_WIDE),
    Conflict(CODES, CODEC, "the host's codec would round it again", "use exact", STAYS_WIDE),
    Conflict(FITTED, RESERVOIR, "what --ragged-reservoir gives back would count twice", "", STAYS_UNFITTED),
    Conflict(FITTED, SINKS, "calibration does not record this model's learned sinks", "", STAYS_UNFITTED),
    Conflict(FITTED, M_ROPE, "this model has three positions per token (M-RoPE)", "", STAYS_UNFITTED),
)


def against(one: str, launch: Launch) -> Conflict | None:
    """The first conflict of CODES or FITTED with what a start has."""
    return next((found for found in CONFLICTS if found.one == one and CASES[found.other](launch)), None)


def refuse_conflicts(launch: Launch) -> None:
    """Raise RaggedConfigError for the first two things of a start that do not go together."""
    for found in CONFLICTS:
        if found.effect == REFUSED and CASES[found.one](launch) and CASES[found.other](launch):
            raise RaggedConfigError(f"{found.one} is not supported with {found.other}: {found.why}; {found.advice}")


def table() -> str:
    """All conflicts as a table in Markdown, a line each."""
    rows = [
        f"| {_shown(found.one)} | {_shown(found.other)} | {found.why} | {found.advice or '-'} | {found.effect} |"
        for found in CONFLICTS
    ]
    return "\n".join(["| this | with | why not | instead | what happens |", "|---|---|---|---|---|", *rows])


def _shown(case: str) -> str:
    return f"`{case}`" if case.startswith("--") else case

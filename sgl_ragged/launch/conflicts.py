"""What does not go together: one table, from which refusals are raised and docs/conflicts.md is made."""

from __future__ import annotations

from collections.abc import Callable

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import features
from sgl_ragged.launch.multimodal import counts_pictures
from sgl_ragged.launch.start import (
    CODES,
    FITTED,
    FLASHINFER,
    FP8,
    M_ROPE,
    MANY_RANKS,
    MIXED,
    NODES,
    REFUSED,
    SINKS,
    SPLIT,
    STAGES,
    STAYS_UNFITTED,
    STAYS_WIDE,
    TREE,
    Conflict,
    Launch,
)
from sgl_ragged.mem_pool.kv_dtype import is_fp8

OWN_CASES: dict[str, Callable[[Launch], bool]] = {
    SPLIT: lambda launch: launch.options.fairkv == "split",
    FLASHINFER: lambda launch: launch.options.kernel == "flashinfer",
    TREE: lambda launch: launch.server_args.radix_cache_backend not in (None, "", *_own_trees()),
    MIXED: lambda launch: launch.server_args.enable_mixed_chunk,
    SINKS: lambda launch: launch.model is not None and launch.model.has_attention_sinks,
    M_ROPE: lambda launch: launch.model is not None and counts_pictures(launch.model.hf_text_config),
    MANY_RANKS: lambda launch: launch.geometry is not None and launch.server_args.tp_size > launch.geometry.num_heads,
    NODES: lambda launch: launch.server_args.nnodes > 1,
    STAGES: lambda launch: launch.server_args.pp_size > 1,
    FP8: lambda launch: launch.kv_dtype is not None and is_fp8(launch.kv_dtype),
}
"""Options and properties of models, and how it is seen that a start has them."""

OWN_CONFLICTS = (
    Conflict(SPLIT, FLASHINFER, "flashinfer attends to whole heads", "use triton, or --ragged-fairkv permute"),
    Conflict(SPLIT, SINKS, "each part of a head would count its sink", "use permute"),
    Conflict(FLASHINFER, SINKS, "flashinfer does not know them", "use --ragged-kernel triton"),
    Conflict(CODES, FLASHINFER, "FlashInfer reads numbers, no codes", "use --ragged-kernel triton", STAYS_WIDE),
    Conflict(
        CODES, FP8, "what is FP8 in tails would be rounded twice", "use wide, or --kv-cache-dtype auto", STAYS_WIDE
    ),
    Conflict(FITTED, SINKS, "calibration does not record this model's learned sinks", "", STAYS_UNFITTED),
    Conflict(FITTED, M_ROPE, "this model has three positions per token (M-RoPE)", "", STAYS_UNFITTED),
)


def _own_trees() -> list[str]:
    return [feature.radix_cache[0] for feature in features() if feature.radix_cache is not None]


def cases() -> dict[str, Callable[[Launch], bool]]:
    """Things that a start can have, and how they are seen: features, what else they know of, and OWN_CASES.

    Codes and fitting are what a server does by itself where nothing speaks against it: they are asked about by name.
    """
    of_features = {feature.case: feature.asked for feature in features()}
    return of_features | {name: seen for feature in features() for name, seen in feature.cases.items()} | OWN_CASES


def conflicts() -> tuple[Conflict, ...]:
    """All of them, those of features first. What a feature takes and decides per layer knows of no stages."""
    own = tuple(found for feature in features() for found in feature.conflicts)
    of_stages = (Conflict(STAGES, feature.case, "it knows of one stage alone", "use --tp") for feature in features())
    return own + tuple(of_stages) + OWN_CONFLICTS


def against(one: str, launch: Launch) -> Conflict | None:
    """The first conflict of CODES or FITTED with what a start has."""
    seen = cases()
    return next((found for found in conflicts() if found.one == one and seen[found.other](launch)), None)


def refuse_conflicts(launch: Launch) -> None:
    """Raise RaggedConfigError for the first two things of a start that do not go together."""
    seen = cases()
    for found in conflicts():
        if found.effect == REFUSED and seen[found.one](launch) and seen[found.other](launch):
            raise RaggedConfigError(f"{found.one} is not supported with {found.other}: {found.why}; {found.advice}")


def table() -> str:
    """All conflicts as a table in Markdown, a line each, those that refuse a start first."""
    listed = sorted(conflicts(), key=lambda one: (REFUSED, STAYS_WIDE, STAYS_UNFITTED).index(one.effect))
    rows = [
        f"| {_shown(found.one)} | {_shown(found.other)} | {found.why} | {found.advice or '-'} | {found.effect} |"
        for found in listed
    ]
    return "\n".join(["| this | with | why not | instead | what happens |", "|---|---|---|---|---|", *rows])


def _shown(case: str) -> str:
    return f"`{case}`" if case.startswith("--") else case

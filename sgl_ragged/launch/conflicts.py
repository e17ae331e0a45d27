"""What does not go together: one table, from which refusals are raised and docs/conflicts.md is made."""

from __future__ import annotations

from collections.abc import Callable

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import REFUSED, STAYS_UNFITTED, STAYS_WIDE, UNCHECKED, Conflict, launch_features
from sgl_ragged.launch.multimodal import counts_pictures
from sgl_ragged.launch.start import ModelStart, Start
from sgl_ragged.mem_pool.kv_dtype import is_fp8

CODES, FITTED, CHECKED = "slabs in 8, 6 and 4 bits", "fitted slabs", "--ragged-check"
"""Defaults of a server where nothing conflicts with them; the first of two things in a conflict."""

SPLIT, FLASHINFER = "--ragged-fairkv split", "--ragged-kernel flashinfer"
MIXED = "--enable-mixed-chunk"
SINKS, M_ROPE = "learned sinks", "three positions per token (M-RoPE)"
NODES, STAGES = "--nnodes", "--pp-size"
QUALITY = "--ragged-quality"
MANY_RANKS, FP8 = "more ranks than heads", "an FP8 cache"

OWN_CASES: dict[str, Callable[[Start], bool]] = {
    SPLIT: lambda start: start.options.fairkv == "split",
    FLASHINFER: lambda start: start.options.kernel == "flashinfer",
    MIXED: lambda start: start.server_args.enable_mixed_chunk,
    NODES: lambda start: start.server_args.nnodes > 1,
    STAGES: lambda start: start.server_args.pp_size > 1,
    QUALITY: lambda start: start.options.quality is not None,
}
"""Cases seen in flags."""

OWN_MODEL_CASES: dict[str, Callable[[ModelStart], bool]] = {
    SINKS: lambda start: start.model.has_attention_sinks,
    M_ROPE: lambda start: counts_pictures(start.model.hf_text_config),
    MANY_RANKS: lambda start: start.server_args.tp_size > start.geometry.num_heads,
    FP8: lambda start: is_fp8(start.kv_dtype),
}
"""Cases seen in flags and model."""

OWN_CONFLICTS = (
    Conflict(SPLIT, FLASHINFER, "flashinfer attends to whole heads", "use triton, or --ragged-fairkv permute"),
    Conflict(QUALITY, NODES, "only the first node has the profile", "use --ragged-ratio"),
    Conflict(SPLIT, SINKS, "each part of a head would count the sink", "use permute"),
    Conflict(FLASHINFER, SINKS, "flashinfer cannot add them", "use --ragged-kernel triton"),
    Conflict(CODES, FLASHINFER, "FlashInfer cannot read codes", "use --ragged-kernel triton", STAYS_WIDE),
    Conflict(
        CODES, FP8, "what is FP8 in tails would be rounded twice", "use wide, or --kv-cache-dtype auto", STAYS_WIDE
    ),
    Conflict(FITTED, SINKS, "calibration does not record this model's learned sinks", "", STAYS_UNFITTED),
    Conflict(FITTED, M_ROPE, "this model has three positions per token (M-RoPE)", "", STAYS_UNFITTED),
)


def cases() -> tuple[dict[str, Callable[[Start], bool]], dict[str, Callable[[ModelStart], bool]]]:
    """Return all cases by name: those seen in flags, and those seen in flags and model.

    CODES, FITTED and CHECKED are none: `against` looks them up by name.
    """
    of_flags, of_model = dict(OWN_CASES), dict(OWN_MODEL_CASES)
    for feature in launch_features():
        of_flags |= {feature.case: feature.asked, **feature.cases}
    return of_flags, of_model


def _has(start: Start, case: str) -> bool:
    of_flags, of_model = cases()
    if isinstance(start, ModelStart) and case in of_model:
        return of_model[case](start)
    return case in of_flags and of_flags[case](start)


def conflicts() -> tuple[Conflict, ...]:
    """Return all conflicts, those of features first. What features hold per layer is of one pipeline stage."""
    own = tuple(found for feature in launch_features() for found in feature.conflicts)
    stages = (Conflict(STAGES, one.case, "it knows only one stage", "use --tp") for one in launch_features())
    return own + tuple(stages) + OWN_CONFLICTS


def against(one: str, start: ModelStart) -> Conflict | None:
    """Return the first conflict of CODES, FITTED or CHECKED with a start, or None."""
    return next((found for found in conflicts() if found.one == one and _has(start, found.other)), None)


def refuse_conflicts(start: Start) -> None:
    """Raise RaggedConfigError for the first conflict of a start, as far as it is known."""
    for found in conflicts():
        if found.effect == REFUSED and _has(start, found.one) and _has(start, found.other):
            raise RaggedConfigError(f"{found.one} is not supported with {found.other}: {found.why}; {found.advice}")


def table() -> str:
    """Return all conflicts as Markdown: a table for each effect. Conflicts that differ in `other` alone share a row."""
    others: dict[tuple[str, ...], list[str]] = {}
    for found in conflicts():
        others.setdefault((found.effect, found.one, found.why, found.advice), []).append(_shown(found.other))
    sections = []
    for effect in (REFUSED, STAYS_WIDE, STAYS_UNFITTED, UNCHECKED):
        rows = [
            f"| {_shown(one)} | {', '.join(names)} | {why} | {'' if advice == Conflict.advice else advice} |"
            for (own_effect, one, why, advice), names in others.items()
            if own_effect == effect
        ]
        head = [f"## {effect[0].upper()}{effect[1:]}", "", "| this | with | why not | instead |", "|---|---|---|---|"]
        sections.append("\n".join([*head, *rows]))
    return "\n\n".join(sections)


def _shown(case: str) -> str:
    return f"`{case}`" if case.startswith("--") else case

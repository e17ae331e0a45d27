"""What a start has, as features and the table of conflicts ask about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sgl_ragged.launch.options import RaggedOptions
    from sgl_ragged.launch.plan import BudgetChoice
    from sgl_ragged.profiles.geometry import ModelGeometry

REFUSED = "the server does not start"
STAYS_WIDE = "`auto` stays `wide`; a format that was asked for is refused"
STAYS_UNFITTED = "served unfitted, and the log says why"

CODES, FITTED = "slabs in 8, 6 and 4 bits", "fitted slabs"
"""What a server does by itself where nothing speaks against it; the first of two things in a conflict."""

SPLIT, FLASHINFER = "--ragged-fairkv split", "--ragged-kernel flashinfer"
TREE, MIXED = "--radix-cache-backend", "--enable-mixed-chunk"
SINKS, M_ROPE = "learned sinks", "three positions per token (M-RoPE)"
NODES, STAGES = "--nnodes", "--pp-size"
MANY_RANKS, FP8 = "more ranks than heads", "an FP8 cache"


@dataclass(frozen=True)
class Launch:
    """A start, as far as it is known; flags alone, before SGLang has read the model.

    server_args: SGLang's settings, as they were asked for. view: as SGLang has resolved them.
    model: its ModelConfig. kv_dtype: of the cache. chosen: the budgets of the model's heads.
    """

    options: RaggedOptions
    server_args: Any
    model: Any = None
    kv_dtype: torch.dtype | None = None
    view: Any = None
    chosen: BudgetChoice | None = None

    @property
    def geometry(self) -> ModelGeometry | None:
        if self.model is None:
            return None
        from sgl_ragged.launch.models import model_geometry

        return model_geometry(self.model)


@dataclass(frozen=True)
class Conflict:
    """one, other: names of what a start has (`conflicts.cases`), or CODES or FITTED first. why: one clause.

    advice: what to do instead. effect: one of REFUSED, STAYS_WIDE, STAYS_UNFITTED.
    """

    one: str
    other: str
    why: str
    advice: str = "drop one of the two"
    effect: str = REFUSED

"""Settings of drafts that workers follow, and sizes of a draft model's cache. Without SGLang.

Keys and values of a draft model are stored uncompressed in a pool of its own, at the tokens' locations in the pool of
slabs: one token of the draft model per virtual token. They are freed with the pages at these locations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_ragged.launch.plan import FeatureSettings, Rank
from sgl_ragged.mem_pool.sizing import PoolSizes


@dataclass(frozen=True)
class DraftModel:
    """Sizes of a draft model's cache on one rank. name: name in messages. itemsize: bytes per element."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.itemsize


BACKENDS = {"cpu": "torch_native", "cuda": "triton"}
"""Attention of the draft model, by device."""


@dataclass(frozen=True)
class DraftSettings(FeatureSettings):
    """Settings of drafts that workers follow.

    width: tokens of a chain, the first of which is certain. model: the draft model, or None for n-grams.
    overlapped: True where a step is prepared while the step before it is computed.
    """

    width: int
    model: DraftModel | None = None
    overlapped: bool = False

    @property
    def state(self) -> tuple[Any, ...]:
        return (self.width, self.model.token_bytes if self.model else 0)

    def page_bytes(self, rank: Rank) -> int:
        return rank.plan.segment * self.model.token_bytes if self.model else 0

    def describe(self, sizes: PoolSizes) -> str:
        drafter = ""
        if self.model is not None:
            drafter = f" by {self.model.name}, {self.model.token_bytes} bytes for each virtual token"
        without = "" if self.overlapped else ", without overlapped batches"
        return f"chains of {self.width} drafts{drafter}{without}"

"""A model that drafts: what its own cache takes. Without SGLang.

Its keys and values lie uncompressed in a pool of its own, at the tokens' locations in the pool of slabs: one token of
the draft model for each virtual token. So they live as long as the pages that the locations name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftModel:
    """Sizes of its cache on one rank. name: for messages. itemsize: bytes per element."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.itemsize

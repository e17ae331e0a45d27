"""Finished segments: where their tokens lie until they are sealed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class InTails:
    """Segments that fill their tails.

    rows, slots: int64 [segments], the tails they lie in and the slabs they go to.
    numbers: integers [segments], their numbers in their sequences, from 0.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    numbers: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class InChunk:
    """Segments that lie in a chunk of one layer.

    firsts: integers [segments], index of each segment's first token. slots, numbers: as in `InTails`.
    keys, values: [tokens, heads, head_dim], keys after RoPE, in the cache's dtype.
    sides: [tokens, heads, elements], what the scorer needs of each token beside these, if anything.
    run: index of the first token where each segment lies behind the one before, so that nothing needs to be gathered;
        None where they may lie anywhere.
    """

    firsts: torch.Tensor
    slots: torch.Tensor
    numbers: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sides: torch.Tensor | None
    run: int | None = None

    def __len__(self) -> int:
        return len(self.slots)


Finished = InTails | InChunk

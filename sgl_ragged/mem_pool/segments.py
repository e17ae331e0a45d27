"""Finished segments: the place of their tokens until they are sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class InTails:
    """Full open segments.

    req_pool_indices: int64 [segments], rows of SGLang's table. pages: int32 [segments, K], where their tokens lie,
    the first of them the stages (`Tails.stage`). slots: int64 [segments], the slabs they go to.
    segment_indices: integers [segments], their numbers in their sequences, from 0.
    """

    req_pool_indices: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    segment_indices: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class InChunk:
    """Finished segments inside a chunk of one layer.

    firsts: integers [segments], index of each segment's first token. slots, segment_indices: as in `InTails`.
    keys, values: [tokens, heads, head_dim], keys after RoPE, in the cache's dtype.
    scorer_inputs: [tokens, heads, elements], the scorer's inputs of each token, or None.
    run: index of the first token if segments are adjacent, so that nothing needs to be gathered; else None.
    places: int64 [segments, S], the index of each of their tokens, or None if it is not made yet.
    """

    firsts: torch.Tensor
    slots: torch.Tensor
    segment_indices: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scorer_inputs: torch.Tensor | None
    run: int | None = None
    places: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.slots)


Finished = InTails | InChunk


@dataclass(frozen=True)
class Sealed:
    """Segments that have just been sealed, for listeners (`SlabStore.add_seal_listener`).

    layers: those in which they were. segments: all of them, where they still lie.
    chosen: by place in `layers`, integers [segments, heads, S]: the first `totals[layer, head]` are the positions that
        a head keeps, the rest is undefined. None for layers in which all heads keep everything.
    totals: int64 [layers of the model, heads], tokens that heads keep, on all ranks together.
    """

    layers: Sequence[int]
    segments: Finished
    chosen: Sequence[torch.Tensor | None]
    totals: torch.Tensor

    def kept(self, layer: int, length: int) -> torch.Tensor:
        """Return the tokens that each head of a layer keeps, bool [segments, heads, S]; length: S."""
        chosen, totals = self.chosen[self.layers.index(layer)], self.totals[layer]
        if chosen is None:
            shape = (len(self.segments), len(totals), length)
            return torch.ones(shape, dtype=torch.bool, device=totals.device)
        counts = torch.arange(length, device=totals.device) < totals[:, None]
        # Undefined positions go after the segment.
        places = torch.where(counts, chosen.long(), length)
        kept = torch.zeros((*chosen.shape[:2], length + 1), dtype=torch.bool, device=totals.device)
        return kept.scatter_(2, places, True)[..., :length]


@dataclass(frozen=True)
class SegmentTable:
    """The table has, for every token of a request, slot * segment + place; nothing here waits for the device.

    req_to_token: int32 [rows, context]. segment: tokens of one.
    """

    req_to_token: torch.Tensor
    segment: int

    @property
    def num_rows(self) -> int:
        return self.req_to_token.shape[0]

    @property
    def most_segments(self) -> int:
        """Most segments of one request, the open one included."""
        return -(-self.req_to_token.shape[1] // self.segment)

    def first_slots(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the slots of the first `count` segments of rows, int32 [rows, at most count]; rows: int64 [rows]."""
        firsts = self.req_to_token[:, : count * self.segment : self.segment].index_select(0, rows)
        return firsts.div_(self.segment, rounding_mode="floor")

    def slots(self, rows: torch.Tensor | int, numbers: torch.Tensor) -> torch.Tensor:
        """Return slots, int32, for rows and segment numbers, integers that broadcast together."""
        firsts = self.req_to_token[rows, numbers.long() * self.segment]
        return firsts.div_(self.segment, rounding_mode="floor")

    def row_slots(self, row: int, count: int) -> torch.Tensor:
        """Return the slots of the first `count` segments of one row, int64 [count]."""
        return self.req_to_token[row, : count * self.segment : self.segment].long() // self.segment

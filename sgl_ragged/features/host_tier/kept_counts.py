"""Counts of heads per layer that keep each token, recorded when segments are sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.layout import SlabLayout

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.segments import Sealed
    from sgl_ragged.mem_pool.slab_store import SlabStore


class KeptCounts:
    """`counts`: uint8 [num_slots, layers, S], the heads of each layer that keep a token of the segment in a slot.

    A byte per token and layer, beside the KV budget. A function of the segment and its number, as the slab is; of slots
    whose slabs came from elsewhere it says nothing.
    """

    def __init__(self, layout: SlabLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        shape = (num_slots, layout.num_layers, layout.segment)
        self.counts = torch.zeros(shape, dtype=torch.uint8, device=device)

    def note(self, store: SlabStore, sealed: Sealed) -> None:
        """A listener of `SlabStore.add_seal_listener`. Changes the counts of the segments' slots."""
        slots = sealed.segments.slots.long()
        for layer in sealed.layers:
            self.counts[slots, layer] = sealed.kept(layer, self.layout.segment).sum(dim=1, dtype=torch.uint8)

"""How many heads of a layer keep each token: noted when segments are sealed, for those who compare layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.scorers import rank_positions

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.segments import Finished
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
        self._totals = torch.tensor(layout.totals, device=device)

    def note(self, store: SlabStore, layer: int | None, segments: Finished) -> None:
        """`SlabStore.watchers`: scores the segments once more, as no sealer says what it kept."""
        for number in range(self.layout.num_layers) if layer is None else [layer]:
            order = rank_positions(store.scorer.score(store.segment_data(number, segments)), segments.numbers == 0)
            places = torch.arange(self.layout.segment, device=order.device)
            first_of = (places < self._totals[number][:, None]).to(torch.uint8).expand_as(order)
            kept = torch.zeros_like(first_of, memory_format=torch.contiguous_format).scatter_(2, order, first_of)
            self.counts[segments.slots.long(), number] = kept.sum(dim=1, dtype=torch.uint8)

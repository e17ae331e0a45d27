"""Sealing in torch: the oracle of the kernels, and what runs on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.segments import Finished
from sgl_ragged.scorers import keep_positions, rank_positions

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.slab_store import SlabStore


def seal_in_torch(store: SlabStore, layers: Sequence[int], segments: Finished) -> list[torch.Tensor | None]:
    """`SlabStore.sealer`."""
    return [_seal_layer(store, layer, segments) for layer in layers]


def _seal_layer(store: SlabStore, layer: int, segments: Finished) -> torch.Tensor | None:
    """Seal in one layer; what `rank_positions` says, None where all is kept."""
    rows, order = store.segment_rows(layer, segments), None
    every_key, every_value = (movable(part) for part in rows)
    if any(band.total < store.layout.segment for band in store.layout.bands[layer]):
        scores = store.scorer.score(store.segment_data(layer, segments, rows))
        order = rank_positions(scores, segments.segment_indices == 0)
        if store.corrector is not None:
            every_key, every_value = store.corrector(layer, (every_key, every_value), order, segments.segment_indices)
    for index, band in enumerate(store.layout.bands[layer]):
        if band.kept == 0:
            continue
        heads = store.band_heads(layer, index)
        keys, values = every_key.index_select(1, heads), every_value.index_select(1, heads)
        stored = slice(band.first, band.first + band.kept)
        if band.total < store.layout.segment:
            assert order is not None, "tokens are chosen from"
            kept = keep_positions(order.index_select(1, heads), band.total)[..., stored]
            places = kept[..., None].expand(*kept.shape, store.layout.head_dim)
            keys, values = keys.gather(2, places), values.gather(2, places)
        else:
            keys, values = keys[:, :, stored], values[:, :, stored]
        store.write_band(layer, band, segments.slots.long(), keys, values)
    return order

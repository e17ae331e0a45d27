"""Fitting what heads keep of segments of a store, in the store's formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.attention_matching import matched
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.quantise import stored_keys

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.slab_store import SlabStore


def fit_band(
    store: SlabStore,
    layer: int,
    heads: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [segments, heads, kept, d] that heads of a layer are to store, as `SlabStore.write_band` takes
    them.

    Args:
        heads: int64 [heads], of the layer. rows: keys and values [segments, heads, S, d] as the cache holds them, FP8
            as bytes. places: int64 [segments, heads, kept]. numbers: integers [segments].
    """
    assert store.references is not None, "the store has a codebook"
    form = store.layout.form

    def stored(keys: torch.Tensor) -> torch.Tensor:
        if form.quantised:
            return stored_keys(keys, form)
        return store.from_cache(layer, 0, store.to_cache(layer, keys, keys)[0])

    keys, values = (store.from_cache(layer, part, x.view(store.dtype)) for part, x in enumerate(rows))
    fitted = matched(keys, values, places, numbers, store.references[layer].heads(heads), stored)
    if form.quantised:
        return fitted
    keys, values = store.to_cache(layer, *fitted)
    return movable(keys), movable(values)

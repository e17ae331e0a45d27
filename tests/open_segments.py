"""Open segments in pages: full ones are laid into a store, and read back by plain indexing."""

from __future__ import annotations

import torch

from sgl_ragged.mem_pool.segments import InTails
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import NOW


def full_segments(
    store: SlabStore,
    rows: torch.Tensor,
    slots: torch.Tensor,
    numbers: torch.Tensor,
    tokens: torch.Tensor,
    beside: int,
    inputs: torch.Tensor | None = None,
) -> InTails:
    """Lay open segments into a store until they are full, and stage them.

    Args:
        rows, slots, numbers: integers [n], as in `InTails`.
        tokens: [n, layers, 2 (K, V), heads, S, d], keys and values before they are as the cache holds them.
        beside: the slot from which on extra pages and stages are taken, in scattered order.
        inputs: [n, layers, heads, S, elements], what the scorer needs of each token.
    """
    tails, segment = store.tails, store.layout.segment
    table = pages_beside(len(rows), tails.open_pages.most, beside)
    assert int(table.max()) < len(store.slabs), "the store has too few slots"
    tails.table[rows, NOW] = table
    pages = tails.pages(rows, slots, NOW)
    each = pages.repeat_interleave(segment, 0)
    places = torch.arange(segment).repeat(len(rows))
    for layer in range(store.layout.num_layers):
        # [n * S, heads, d] each
        keys, values = (tokens[:, layer, part].transpose(1, 2).flatten(0, 1) for part in (0, 1))
        store.append(layer, each, places, keys, values)
        if inputs is not None:
            own = inputs[:, layer].transpose(1, 2).flatten(0, 1)
            tails.append_inputs(layer, each, rows.repeat_interleave(segment), places, own)
    staged = tails.pages(rows, tails.stages(rows, NOW), NOW)
    return InTails(rows, tails.stage(slots, staged), slots, numbers)


def pages_beside(segments: int, most: int, first: int) -> torch.Tensor:
    """int32 [segments, most]: pages from number `first` on, in scattered order."""
    order = torch.randperm(segments * most, generator=torch.Generator().manual_seed(9))
    return (order + first).view(segments, most).int()


def tokens_in(tails: torch.Tensor, pages: torch.Tensor, segment: int) -> torch.Tensor:
    """[n, layers, 2 (K, V), heads, S, d]: what open segments with pages [n, K] hold; `tails` as `Tails.data`."""
    each = tails.shape[4]
    found = [tails[pages[:, place // each].long(), :, :, :, place % each] for place in range(segment)]
    return torch.stack(found, dim=4)

"""Fitting what heads keep of segments of a store, in the store's formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.attention_matching import (
    COARSE_RIDGE,
    MOST_KEPT,
    VALUE_RIDGE,
    Corrections,
    Kept,
    Steps,
    at_once_bytes,
    bytes_per_segment,
    corrections,
)
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import Rows, SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK, QUERIES


@dataclass(frozen=True)
class HeadFit:
    """The heads of a layer, or of some layers one behind the other, that are fitted: those that keep MOST_KEPT of their
    segments, or less.

    heads: int64 [fitted heads]. kept: what they keep on all ranks. references: of these heads.
    """

    heads: torch.Tensor
    kept: Kept
    references: References

    @classmethod
    def of(cls, layout: SlabLayout, layer: int, references: References) -> HeadFit:
        """Of a layer; `references`: of all its heads."""
        chosen = fitted_heads(layout, layer)
        heads = torch.tensor([head for head, _ in chosen], dtype=torch.int64, device=references.queries.device)
        return cls(heads, _kept(layout, chosen, heads.device), references.heads(heads))


def fitted_heads(layout: SlabLayout, layer: int) -> list[tuple[int, int]]:
    """Heads of a layer that are fitted, and the tokens that they keep on all ranks."""
    # Moments are those of the rows that are stored here: of other ranks' parts they are not known.
    return [
        (head, band.total)
        for band in layout.bands[layer]
        for head in band.heads
        if band.kept > 0 and band.total <= MOST_KEPT * layout.segment and not (band.partial and layout.form.centred)
    ]


def _kept(layout: SlabLayout, chosen: Sequence[tuple[int, int]], device: torch.device) -> Kept:
    ridge = COARSE_RIDGE if layout.form.key_bits == 4 else VALUE_RIDGE
    return Kept.of([total for _, total in chosen], layout.segment, device, ridge)


def use_codebook(store: SlabStore) -> None:
    """Have a store correct what heads keep from now on, if there is a codebook among its statistics.

    Its scales are the model's by then. What it holds of the codebook is taken out of the statistics.
    """
    if QUERIES not in store.statistics[0]:
        return
    store.corrector = StoreFit(store)
    # It may be large, and scorers do not look at it.
    store.statistics = [
        {name: tensor for name, tensor in own.items() if name not in CODEBOOK} for own in store.statistics
    ]


class StoreFit:
    """`SlabStore.corrector`, by the codebook among a store's statistics and its scales."""

    def __init__(self, store: SlabStore) -> None:
        layout, self._store = store.layout, store
        pairs = zip(store.statistics, store.scales, strict=True)
        every = References.joined([References.of(own, scale) for own, scale in pairs])
        chosen = [fitted_heads(layout, layer) for layer in range(layout.num_layers)]
        starts = np.cumsum([0, *map(len, chosen)]).tolist()
        device = every.queries.device
        # Once in memory: layers and runs of layers are views of it.
        numbers = [layer * layout.num_heads + head for layer, own in enumerate(chosen) for head, _ in own]
        own = every.heads(torch.tensor(numbers, dtype=torch.int64, device=device))

        def fit(first: int, end: int) -> HeadFit:
            """Of the layers from `first` to `end`."""
            several = [(n, one) for n, layer in enumerate(range(first, end)) for one in chosen[layer]]
            heads = [n * layout.num_heads + head for n, (head, _) in several]
            kept = _kept(layout, [one for _, one in several], device)
            references = own.heads(slice(starts[first], starts[end]))
            return HeadFit(torch.tensor(heads, dtype=torch.int64, device=device), kept, references)

        self._layers = [fit(layer, layer + 1) for layer in range(layout.num_layers)]
        # In FP8 every layer has scales of its own.
        most = 1 if store.fp8 else layers_at_once(every.queries, layout)
        runs = range(0, layout.num_layers, most)
        self._runs = [(first, fit(first, min(first + most, layout.num_layers))) for first in runs]

    def __call__(self, layer: int, rows: Rows, order: torch.Tensor, numbers: torch.Tensor) -> Rows:
        """Copies of `rows`, in which what is kept is corrected. order: `rank_positions` of the segments."""
        fit = self._layers[layer]
        if not len(fit.heads):
            return rows
        # Copies, in which every token of every head has a number.
        every = [x.clone(memory_format=torch.contiguous_format) for x in rows]
        count, heads, length = every[0].shape[:3]
        firsts = torch.arange(0, count * heads * length, length, device=order.device).view(count, heads)
        ranked = firsts[:, fit.heads, None] + order.index_select(1, fit.heads)
        flat = ranked.flatten()
        keys, values = (x.flatten(0, 2).index_select(0, flat).view(*ranked.shape, -1) for x in every)
        found = self._corrections(fit, layer, keys, values, numbers, torch_steps)
        corrected = ranked.gather(2, found.ranks).flatten()
        for x, new in zip(every, self._store.to_cache(layer, found.keys, found.values), strict=True):
            x.flatten(0, 2).index_copy_(0, corrected, movable(new).flatten(0, 2))
        return every[0], every[1]

    def in_place(self, layers: Sequence[int], rows: torch.Tensor, numbers: torch.Tensor, steps: Steps) -> None:
        """Correct what is kept. rows: [segments, heads of these layers, 2, S, d], what a head keeps in front."""
        heads = self._store.layout.num_heads
        for first, fit in [(layers[0], self._layers[layers[0]])] if len(layers) == 1 else self._runs:
            if not len(fit.heads):
                continue
            own = fit.heads if first == layers[0] else (first - layers[0]) * heads + fit.heads
            keys, values = (rows[:, own, part] for part in (0, 1))
            found = self._corrections(fit, first, keys, values, numbers, steps)
            segment = torch.arange(len(rows), device=own.device)[:, None, None]
            for part, new in enumerate(self._store.to_cache(first, found.keys, found.values)):
                movable(rows)[segment, own[:, None], part, found.ranks] = movable(new)

    def _corrections(
        self, fit: HeadFit, layer: int, keys: torch.Tensor, values: torch.Tensor, numbers: torch.Tensor, steps: Steps
    ) -> Corrections:
        """Of rows [segments, fitted heads, S, d], as the cache holds them or as its bytes, in the order of what is
        kept. layer: whose scales they have, where the cache is FP8."""
        store, form = self._store, self._store.layout.form

        def stored(rows: torch.Tensor, places: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
            rounded = store.from_cache(layer, 0, store.to_cache(layer, rows, rows)[0]).float()
            if not form.quantised:
                return rounded
            return steps.nearly_stored(rounded, places, keys, fit.kept, form.key_bits, form.centred)

        keys, values = (store.from_cache(layer, part, x.view(store.dtype)) for part, x in enumerate((keys, values)))
        return corrections(keys, values, fit.kept, numbers, fit.references, stored, steps)


def layers_at_once(queries: torch.Tensor, layout: SlabLayout) -> int:
    """Layers whose heads are fitted together: as many as one segment of theirs has room for. queries: [H, d, m]."""
    segment = bytes_per_segment(layout.num_heads, queries.shape[2], layout.segment)
    return max(at_once_bytes(queries.device) // segment, 1)

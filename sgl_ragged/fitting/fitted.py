"""Fitting what heads keep of segments of a store, in the store's formats."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_ragged.fitting.attention_matching import corrections
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import stored_keys
from sgl_ragged.mem_pool.slab_format import SlabFormat
from sgl_ragged.mem_pool.slab_store import Rows, SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK, QUERIES


@dataclass(frozen=True)
class LayerFit:
    """The heads of a layer that are fitted: those that do not keep everything.

    heads: int64 [fitted heads]. totals: int64 [fitted heads, 1], tokens of a segment that they keep on all ranks.
    groups: places among `heads` of those that keep equally much, and how much. references: of these heads.
    """

    heads: torch.Tensor
    totals: torch.Tensor
    groups: tuple[tuple[torch.Tensor, int], ...]
    references: References

    @classmethod
    def of(cls, layout: SlabLayout, layer: int, references: References) -> LayerFit:
        """`references`: of all heads of the layer."""
        device = references.queries.device
        # Moments are those of the rows that are stored here: of other ranks' parts they are not known.
        fitted = [
            (head, band.total)
            for band in layout.bands[layer]
            for head in band.heads
            if band.kept > 0 and band.total < layout.segment and not (band.partial and layout.form.centred)
        ]
        heads = torch.tensor([head for head, _ in fitted], dtype=torch.int64, device=device)
        totals = [total for _, total in fitted]
        groups = tuple(
            (torch.tensor([n for n, own in enumerate(totals) if own == total], device=device), total)
            for total in sorted(set(totals))
        )
        counts = torch.tensor(totals, dtype=torch.int64, device=device)[:, None]
        return cls(heads, counts, groups, references.heads(heads))

    def kept(self, order: torch.Tensor) -> torch.Tensor:
        """bool [segments, fitted heads, S]: what they keep, by `rank_positions` of all heads."""
        ranked = order.index_select(1, self.heads)
        first = torch.arange(order.shape[-1], device=order.device) < self.totals
        return torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked, first.expand_as(ranked))

    def stored(
        self, rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor, form: SlabFormat
    ) -> torch.Tensor:
        """Rows of keys as codes give them back; arguments as `attention_matching.Stored` has them."""
        if not form.centred:
            return stored_keys(rows, form)
        # Moments are those of all that a head keeps.
        index = places[..., None].expand_as(rows)
        every = keys.float().scatter(2, index, rows)
        for heads, total in self.groups:
            own = kept[:, heads].int().argsort(dim=-1, descending=True, stable=True)[..., :total]
            own = own[..., None].expand(*own.shape, keys.shape[-1])
            of_heads = every[:, heads]
            every[:, heads] = of_heads.scatter(2, own, stored_keys(of_heads.gather(2, own), form))
        return every.gather(2, index)


def layer_fits(layout: SlabLayout, statistics: list[Mapping[str, torch.Tensor]], scales: list[float]) -> list[LayerFit]:
    """Of all layers, from their statistics, the codebook's among them, and what logits are scaled by."""
    return [
        LayerFit.of(layout, layer, References.of(own, scale))
        for layer, (own, scale) in enumerate(zip(statistics, scales, strict=True))
    ]


def use_codebook(store: SlabStore) -> None:
    """Have a store correct what heads keep from now on, if there is a codebook among its statistics.

    Its scales are the model's by then. What it holds of the codebook is taken out of the statistics.
    """
    if QUERIES not in store.statistics[0]:
        return
    fits = layer_fits(store.layout, list(store.statistics), store.scales)
    store.corrector = functools.partial(fit_segments, store, fits)
    # It may be large, and scorers do not look at it.
    store.statistics = [
        {name: tensor for name, tensor in own.items() if name not in CODEBOOK} for own in store.statistics
    ]


def fit_segments(
    store: SlabStore,
    fits: Sequence[LayerFit],
    layer: int,
    rows: Rows,
    order: torch.Tensor,
    numbers: torch.Tensor,
) -> Rows:
    """Keys and values of a layer's segments, what is kept of them corrected: copies like `rows` (`Corrector`).

    Args:
        rows: [segments, heads, S, d], as the cache holds them, FP8 as bytes. order: `rank_positions` of the segments.
        numbers: integers [segments].
    """
    fit, form = fits[layer], store.layout.form
    if not len(fit.heads):
        return rows

    def stored(rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        rounded = store.from_cache(layer, 0, store.to_cache(layer, rows, rows)[0]).float()
        return fit.stored(rounded, places, keys, kept, form) if form.quantised else rounded

    of_heads = [x.index_select(1, fit.heads) for x in rows]
    keys, values = (store.from_cache(layer, part, x.view(store.dtype)) for part, x in enumerate(of_heads))
    found = corrections(keys, values, fit.kept(order), numbers, fit.references, stored)
    index = found.places[..., None].expand_as(found.keys)
    new = (movable(part) for part in store.to_cache(layer, found.keys, found.values))
    corrected = (own.scatter(2, index, part) for own, part in zip(of_heads, new, strict=True))
    keys, values = (x.index_copy(1, fit.heads, part) for x, part in zip(rows, corrected, strict=True))
    return keys, values

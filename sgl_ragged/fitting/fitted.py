"""Fitting what heads keep of segments of a store, in the store's formats."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_ragged.fitting.attention_matching import COARSE_RIDGE, MOST_KEPT, VALUE_RIDGE, Kept, corrections
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import largest_code, rotation_matrix
from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE, SlabFormat
from sgl_ragged.mem_pool.slab_store import Rows, SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK, QUERIES


@dataclass(frozen=True)
class LayerFit:
    """The heads of a layer that are fitted: those that keep MOST_KEPT of their segments, or less.

    heads: int64 [fitted heads]. kept: what they keep on all ranks. references: of these heads.
    """

    heads: torch.Tensor
    kept: Kept
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
            if band.kept > 0 and band.total <= MOST_KEPT * layout.segment and not (band.partial and layout.form.centred)
        ]
        heads = torch.tensor([head for head, _ in fitted], dtype=torch.int64, device=device)
        ridge = COARSE_RIDGE if layout.form.key_bits == 4 else VALUE_RIDGE
        return cls(heads, Kept.of([total for _, total in fitted], device, ridge), references.heads(heads))

    def stored(
        self, rows: torch.Tensor, places: torch.Tensor | None, keys: torch.Tensor, form: SlabFormat
    ) -> torch.Tensor:
        """Rows of keys as codes give them back; arguments as `attention_matching.Stored` has them."""
        moments = None
        if form.centred:
            # Moments are those of all that a head keeps.
            every = rows if places is None else keys.scatter(2, places[..., None].expand_as(rows), rows)
            moments = self._moments(every)
        return nearly_stored(rows, form.key_bits, moments)

    def _moments(self, keys: torch.Tensor) -> torch.Tensor:
        """`row_moments` of keys [segments, heads, most, d], but for their last bits."""
        own = None if self.kept.own is None else self.kept.own.float()
        counts = self.kept.totals[..., None].float()
        mean = ((keys if own is None else keys * own).sum(dim=2, keepdim=True) / counts).half().float()
        distance = (keys - mean).square_()
        spread = ((distance if own is None else distance.mul_(own)).sum(dim=2, keepdim=True) / counts).sqrt_().sqrt_()
        return torch.stack([mean, spread.clamp_min_(LEAST_SCALE).half().float()])


def nearly_stored(rows: torch.Tensor, bits: int, moments: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [.., d] as codes of so many bits give them back; `stored_keys` in few operations, but for last bits.

    Args:
        moments: float32 [2 (mean, spread), .., 1, d], where the format's keys are centred.
    """
    matrix, most = rotation_matrix(rows.shape[-1], rows.device), largest_code(bits)
    turned = (rows if moments is None else (rows - moments[0]).div_(moments[1])) @ matrix
    scale = (turned.abs().amax(dim=-1, keepdim=True) / most).clamp_(LEAST_SCALE, MOST_SCALE).half().float()
    back = turned.div_(scale).round_().clamp_(-most, most).mul_(scale) @ matrix
    return back if moments is None else torch.addcmul(moments[0], back, moments[1])


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

    def stored(rows: torch.Tensor, places: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
        rounded = store.from_cache(layer, 0, store.to_cache(layer, rows, rows)[0]).float()
        return fit.stored(rounded, places, keys, form) if form.quantised else rounded

    # Copies, in which every token of every head has a number.
    every = [x.clone(memory_format=torch.contiguous_format) for x in rows]
    count, heads, length = every[0].shape[:3]
    firsts = torch.arange(0, count * heads * length, length, device=order.device).view(count, heads)
    ranked = firsts[:, fit.heads, None] + order.index_select(1, fit.heads)
    flat = ranked.flatten()
    keys, values = (
        store.from_cache(layer, part, x.flatten(0, 2).index_select(0, flat).view(store.dtype)).view(*ranked.shape, -1)
        for part, x in enumerate(every)
    )
    found = corrections(keys, values, fit.kept, numbers, fit.references, stored)
    corrected = ranked.gather(2, found.ranks).flatten()
    for x, new in zip(every, store.to_cache(layer, found.keys, found.values), strict=True):
        x.flatten(0, 2).index_copy_(0, corrected, movable(new).flatten(0, 2))
    return every[0], every[1]

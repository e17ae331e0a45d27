"""Fit of the kept keys and values of a slab store's segments, in the store's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Fitted heads of one layer or of several consecutive layers: those that keep at most MOST_KEPT of their segments.

    Args:
        heads: int64 [fitted heads], numbers of the heads, counted through the layers.
        kept: kept counts of these heads on all ranks.
        references: codebook of these heads.
    """

    heads: torch.Tensor
    kept: Kept
    references: References

    @classmethod
    def for_layer(cls, layout: SlabLayout, layer: int, references: References) -> HeadFit:
        """Choose the fitted heads of a layer.

        Args:
            references: codebook of all heads in the layer.
        """
        chosen = fitted_heads(layout, layer)
        heads = torch.tensor([head for head, _ in chosen], dtype=torch.int64, device=references.queries.device)
        return cls(heads, _kept_counts(layout, chosen, heads.device), references.heads(heads))


def fitted_heads(layout: SlabLayout, layer: int) -> list[tuple[int, int]]:
    """List the fitted heads of a layer with the tokens that each keeps on all ranks."""
    # Centred formats need the moments of all kept rows, and a rank does not have other ranks' parts of a head.
    return [
        (head, band.total)
        for band in layout.bands[layer]
        for head in band.heads
        if band.kept > 0 and band.total <= MOST_KEPT * layout.segment and not (band.partial and layout.form.centred)
    ]


def _kept_counts(layout: SlabLayout, chosen: Sequence[tuple[int, int]], device: torch.device) -> Kept:
    ridge = COARSE_RIDGE if layout.form.key_bits == 4 else VALUE_RIDGE
    return Kept.from_counts([total for _, total in chosen], layout.segment, device, ridge)


def without_codebook(statistics: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return the statistics that scorers read, without the codebook, which may be large."""
    return [{name: tensor for name, tensor in own.items() if name not in CODEBOOK} for own in statistics]


class StoreFit:
    """Corrector of a slab store (`slab_store.Corrector`), from the codebook in a profile's statistics.

    Args:
        layout: the store's.
        statistics: per layer, tensors [heads, ...] by name, the codebook's among them.
        softmax_scales: as in `SlabStore`.
        fp8: True if the cache is FP8; layers then have scales of their own and are fitted one by one.
    """

    def __init__(
        self,
        layout: SlabLayout,
        statistics: Sequence[Mapping[str, torch.Tensor]],
        softmax_scales: Sequence[float],
        *,
        fp8: bool,
    ) -> None:
        layers = zip(statistics, softmax_scales, strict=True)
        references = References.concatenate([References.from_statistics(own, scale) for own, scale in layers])
        chosen = [fitted_heads(layout, layer) for layer in range(layout.num_layers)]
        starts = np.cumsum([0, *map(len, chosen)]).tolist()
        device = references.queries.device
        # One copy in memory: layers and runs of layers are views of it.
        numbers = [layer * layout.num_heads + head for layer, heads in enumerate(chosen) for head, _ in heads]
        fitted_references = references.heads(torch.tensor(numbers, dtype=torch.int64, device=device))

        def make_fit(first: int, end: int) -> HeadFit:
            """Make the fit of the layers from `first` up to, but without, `end`."""
            run = [(offset, head) for offset, layer in enumerate(range(first, end)) for head in chosen[layer]]
            heads = [offset * layout.num_heads + head for offset, (head, _) in run]
            kept = _kept_counts(layout, [head for _, head in run], device)
            run_references = fitted_references.heads(slice(starts[first], starts[end]))
            return HeadFit(torch.tensor(heads, dtype=torch.int64, device=device), kept, run_references)

        self._layers = [make_fit(layer, layer + 1) for layer in range(layout.num_layers)]
        # FP8 scales differ between layers, so each layer is a run.
        run_length = 1 if fp8 else layers_at_once(references.queries, layout)
        firsts = range(0, layout.num_layers, run_length)
        self._runs = [(first, make_fit(first, min(first + run_length, layout.num_layers))) for first in firsts]

    @classmethod
    def from_statistics(
        cls,
        layout: SlabLayout,
        statistics: Sequence[Mapping[str, torch.Tensor]],
        softmax_scales: Sequence[float],
        *,
        fp8: bool,
    ) -> StoreFit | None:
        """Build the corrector; None if there is no codebook among the statistics."""
        return cls(layout, statistics, softmax_scales, fp8=fp8) if QUERIES in statistics[0] else None

    def __call__(
        self, store: SlabStore, layer: int, rows: Rows, order: torch.Tensor, segment_indices: torch.Tensor
    ) -> Rows:
        """Return copies of a layer's rows in which kept rows are corrected.

        Args:
            order: `rank_positions` of the segments.
            segment_indices: integers [segments], each segment's number in its sequence.
        """
        fit = self._layers[layer]
        if not len(fit.heads):
            return rows
        # Contiguous copies, in which rows of all segments and heads are numbered.
        copies = [x.clone(memory_format=torch.contiguous_format) for x in rows]
        count, heads, length = copies[0].shape[:3]
        firsts = torch.arange(0, count * heads * length, length, device=order.device).view(count, heads)
        ranked = firsts[:, fit.heads, None] + order.index_select(1, fit.heads)
        flat = ranked.flatten()
        keys, values = (x.flatten(0, 2).index_select(0, flat).view(*ranked.shape, -1) for x in copies)
        new = self._corrections(store, fit, layer, keys, values, segment_indices, torch_steps)
        corrected = ranked.gather(2, new.ranks).flatten()
        for x, new_rows in zip(copies, store.to_cache(layer, new.keys, new.values), strict=True):
            x.flatten(0, 2).index_copy_(0, corrected, movable(new_rows).flatten(0, 2))
        return copies[0], copies[1]

    def in_place(
        self, store: SlabStore, layers: Sequence[int], rows: torch.Tensor, segment_indices: torch.Tensor, steps: Steps
    ) -> None:
        """Correct the kept rows of one layer or of all layers in place.

        Args:
            layers: one layer, or all.
            rows: [segments, heads of these layers, 2, S, d], rows of a head in the order of `rank_positions`.
            segment_indices: integers [segments], each segment's number in its sequence.
        """
        num_heads = store.layout.num_heads
        for first, fit in [(layers[0], self._layers[layers[0]])] if len(layers) == 1 else self._runs:
            if not len(fit.heads):
                continue
            heads = fit.heads if first == layers[0] else (first - layers[0]) * num_heads + fit.heads
            keys, values = (rows[:, heads, part] for part in (0, 1))
            new = self._corrections(store, fit, first, keys, values, segment_indices, steps)
            segment = torch.arange(len(rows), device=heads.device)[:, None, None]
            for part, new_rows in enumerate(store.to_cache(first, new.keys, new.values)):
                movable(rows)[segment, heads[:, None], part, new.ranks] = movable(new_rows)

    @staticmethod
    def _corrections(
        store: SlabStore,
        fit: HeadFit,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        segment_indices: torch.Tensor,
        steps: Steps,
    ) -> Corrections:
        """Compute corrections of cached rows.

        Args:
            layer: layer whose scales an FP8 cache uses.
            keys, values: [segments, fitted heads, S, d] in the cache's dtype, or its bytes, in the order of
                `rank_positions`.
        """
        form = store.layout.form

        def stored(rows: torch.Tensor, ranks: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
            rounded = store.from_cache(layer, 0, store.to_cache(layer, rows, rows)[0]).float()
            if not form.quantised:
                return rounded
            return steps.nearly_stored(rounded, ranks, keys, fit.kept, form.key_bits, form.centred)

        keys, values = (store.from_cache(layer, part, x.view(store.dtype)) for part, x in enumerate((keys, values)))
        return corrections(keys, values, fit.kept, segment_indices, fit.references, stored, steps)


def layers_at_once(queries: torch.Tensor, layout: SlabLayout) -> int:
    """Return the number of layers that are fitted together.

    The exponentials of one segment in all these layers fit into `at_once_bytes`.

    Args:
        queries: [H, d, m].
    """
    layer_bytes = bytes_per_segment(layout.num_heads, queries.shape[2], layout.segment)
    return max(at_once_bytes(queries.device) // layer_bytes, 1)

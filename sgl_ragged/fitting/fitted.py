"""Fit of the kept keys and values of a slab store's segments, in the store's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.attention_matching import (
    MOST_KEPT,
    Corrections,
    Kept,
    Steps,
    at_once_bytes,
    bytes_per_segment,
    corrections,
)
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.corrected import CodedHeads, CorrectedRows, Rows
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import Band, SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK, QUERIES


@dataclass(frozen=True)
class HeadFit:
    """Fitted heads (`is_fitted`) of one layer or of several consecutive layers.

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
    return [(head, band.total) for band in layout.bands[layer] if is_fitted(layout, band) for head in band.heads]


def is_fitted(layout: SlabLayout, band: Band) -> bool:
    """Return whether the heads of a band are fitted."""
    # Centred formats need the moments of all kept rows, and a rank does not have other ranks' parts of a head.
    divided = band.partial and layout.form.centred
    most = 1.0 if layout.form.quantised else MOST_KEPT
    return band.kept > 0 and band.total <= most * layout.segment and not divided


def _kept_counts(layout: SlabLayout, chosen: Sequence[tuple[int, int]], device: torch.device) -> Kept:
    return Kept.from_counts([total for _, total in chosen], layout.segment, device)


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
    ) -> CorrectedRows:
        """Correct a layer's rows.

        Args:
            order: `rank_positions` of the segments.
            segment_indices: integers [segments], each segment's number in its sequence.
        """
        fit, layout = self._layers[layer], store.layout
        if not len(fit.heads):
            return CorrectedRows(rows, {})
        positions = _kept_first(order.index_select(1, fit.heads), fit.kept)
        count, heads, length = rows[0].shape[:3]
        firsts = torch.arange(0, count * heads * length, length, device=order.device).view(count, heads)
        ranked = firsts[:, fit.heads, None] + positions
        # Contiguous copies, in which rows of all segments and heads are numbered.
        copies = [x.clone(memory_format=torch.contiguous_format) for x in rows]
        keys, values = (x.flatten(0, 2).index_select(0, ranked.flatten()).view(*ranked.shape, -1) for x in copies)
        new = self._corrections(store, fit, layer, keys, values, segment_indices, torch_steps)
        if layout.form.quantised:
            assert new.codes is not None, "the format has codes"
            parts, first = {}, 0
            for index, band in enumerate(layout.bands[layer]):
                if not is_fitted(layout, band):
                    continue
                own, stored = slice(first, first + len(band.heads)), slice(band.first, band.first + band.kept)
                parts[index] = new.codes.part(own, stored).stored(layout.form)
                first = own.stop
            return CorrectedRows(rows, parts)
        corrected = ranked[:, :, : fit.kept.most].flatten()
        for x, new_rows in zip(copies, store.to_cache(layer, new.keys, new.values), strict=True):
            x.flatten(0, 2).index_copy_(0, corrected, movable(new_rows).flatten(0, 2))
        return CorrectedRows((copies[0], copies[1]), {})

    def in_place(
        self, store: SlabStore, layers: Sequence[int], rows: torch.Tensor, segment_indices: torch.Tensor, steps: Steps
    ) -> list[CodedHeads]:
        """Correct the kept rows of one layer or of all layers, in place where slabs are wide.

        Args:
            layers: one layer, or all.
            rows: [segments, heads of these layers, 2, S, d], each head's kept rows first.
            segment_indices: integers [segments], each segment's number in its sequence.

        Returns:
            The corrected heads in codes.
        """
        num_heads, coded = store.layout.num_heads, []
        for first, fit in [(layers[0], self._layers[layers[0]])] if len(layers) == 1 else self._runs:
            if not len(fit.heads):
                continue
            heads = fit.heads if first == layers[0] else (first - layers[0]) * num_heads + fit.heads
            keys, values = (rows[:, heads, part] for part in (0, 1))
            new = self._corrections(store, fit, first, keys, values, segment_indices, steps)
            if new.codes is not None:
                coded.append(CodedHeads(heads, new.codes))
                continue
            for part, new_rows in enumerate(store.to_cache(first, new.keys, new.values)):
                movable(rows)[:, heads, part, : fit.kept.most] = movable(new_rows)
        return coded

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
            keys, values: [segments, fitted heads, S, d] in the cache's dtype, or its bytes, each head's kept rows
                first.
        """

        def rounded(rows: torch.Tensor) -> torch.Tensor:
            return store.from_cache(layer, 0, store.to_cache(layer, rows, rows)[0]).float()

        keys, values = (store.from_cache(layer, part, x.view(store.dtype)) for part, x in enumerate((keys, values)))
        form = store.layout.form
        return corrections(keys, values, fit.kept, segment_indices, fit.references, form, rounded, steps)


def _kept_first(order: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Order positions by whether they are kept, then ascending, as `kernels.seal.choose` does.

    Args:
        order: integers [segments, heads, S], `rank_positions`.
    """
    length = order.shape[-1]
    dropped = torch.arange(length, device=order.device) >= kept.totals
    return (order.long() + length * dropped).sort(dim=-1).values % length


def layers_at_once(queries: torch.Tensor, layout: SlabLayout) -> int:
    """Return the number of layers that are fitted together.

    The exponentials of one segment in all these layers fit into `at_once_bytes`.

    Args:
        queries: [H, d, m].
    """
    layer_bytes = bytes_per_segment(layout.num_heads, queries.shape[2], layout.segment)
    return max(at_once_bytes(queries.device) // layer_bytes, 1)

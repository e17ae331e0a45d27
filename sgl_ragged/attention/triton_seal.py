"""Sealing by Triton kernels: score, choose and write segments of one layer, or of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_ragged.attention.kernels import fit, seal
from sgl_ragged.attention.kernels.write_codes import write_codes
from sgl_ragged.attention.transfer import head_rows
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import Finished, InTails
from sgl_ragged.mem_pool.slab_store import SlabStore

ROWS_BYTES = 128 << 20
"""Bytes of whole segments that are copied at a time to be corrected."""


@dataclass(frozen=True)
class HeadTable:
    """Head tables for kernels, of one layer or of all layers.

    kept: int32 [heads], rows of each sealed segment that are stored here. most_kept: the largest of them, at least 1.
    key_blocks: int64 [heads], where a head's keys start in a slab, in blocks of 16 elements.
    total: int32 [heads], rows that the head keeps on all ranks. first: int64 [heads], those stored on lower ranks.
    """

    kept: torch.Tensor
    most_kept: int
    key_blocks: torch.Tensor
    total: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, layout: SlabLayout, layers: slice, device: torch.device) -> HeadTable:
        # One tensor a layer, not rows of one: kernels are compiled for addresses that divide by 16.
        def table(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(array[layers].ravel(), dtype=dtype, device=device)

        return cls(
            kept=table(layout.kept, torch.int32),
            most_kept=max(int(layout.kept[layers].max()), 1),
            key_blocks=table(layout.key_offset // 16, torch.int64),
            total=table(layout.totals, torch.int32),
            first=table(layout.firsts, torch.int64),
        )


def layer_heads(layout: SlabLayout, device: torch.device) -> list[HeadTable]:
    """Make the head tables of all layers, one for each."""
    return [HeadTable.of(layout, slice(layer, layer + 1), device) for layer in range(layout.num_layers)]


class Whole:
    """Constants for heads that keep every token in order, for the largest number of segments so far.

    kept, key_blocks: as `HeadTable` has them. numbers: int32 [segments], 0, 1, .. positions: int32 [segments, heads,
    S], in order.
    """

    def __init__(self, heads: int, layout: SlabLayout, device: torch.device) -> None:
        self.kept = torch.full((heads,), layout.segment, dtype=torch.int32, device=device)
        self.key_blocks = torch.arange(heads, device=device) * (2 * layout.segment * layout.head_dim // 16)
        self._segment = layout.segment
        self.numbers = self.positions = torch.empty(0, dtype=torch.int32, device=device)

    def of(self, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `numbers` and `positions` for `count` segments."""
        if len(self.numbers) < segments:
            self.numbers = torch.arange(segments, dtype=torch.int32, device=self.kept.device)
            order = torch.arange(self._segment, dtype=torch.int32, device=self.kept.device)
            self.positions = order.repeat(segments, len(self.kept), 1)
        return self.numbers[:segments], self.positions[:segments]


class TritonSealer:
    """Seal segments by kernels: a `slab_store.Sealer`. Three launches for a scorer that has a kernel; corrections also
    take torch's batched products and solvers. Nothing waits for the device."""

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self._layers = layer_heads(layout, device)
        self._every = HeadTable.of(layout, slice(None), device)
        self._whole = {count: Whole(count * layout.num_heads, layout, device) for count in {1, layout.num_layers}}

    def __call__(self, store: SlabStore, layers: Sequence[int], segments: Finished) -> list[torch.Tensor | None]:
        assert len(layers) in (1, store.layout.num_layers), "a chunk's layer, or all of a decode step's"
        layer = layers[0] if len(layers) == 1 else None
        layout, heads = store.layout, self._every if layer is None else self._layers[layer]
        if isinstance(segments, InTails):
            source = seal.Source.of_tails(store.tails.data, segments.pages, layer)
        else:
            source = seal.Source.of_chunk(head_rows(segments.keys), head_rows(segments.values), segments.firsts)
        if store.scorer.name in seal.SCORED:
            scores = seal.score(source, store.scorer.name, layout.segment, layout.head_dim)
        elif store.scorer.scores_tokens_alone:
            scores = _token_scores(store, layer, segments)
        else:
            every = [store.scorer.score(store.segment_data(number, segments)) for number in layers]
            scores = torch.cat(every, dim=1).float().contiguous()
        chosen = seal.choose(scores, segments.segment_indices.to(torch.int32), heads.total)
        if store.corrector is None:
            _write(store, heads, source, segments.slots, chosen)
            return self._by_layer(chosen, layers, layout)
        whole = self._whole[len(layers)]
        for part in _parts(source, layout, len(segments)):
            # Copies: kernels are compiled for addresses that divide by 16.
            firsts, slots = source.firsts[part], segments.slots[part]
            if part.start:
                firsts, slots = firsts.clone(), slots.clone()
            numbers, in_order = whole.of(len(slots))
            own = replace(source, firsts=firsts)
            rows = seal.ordered_rows(own, chosen[part], numbers, whole.kept, whole.key_blocks, layout.head_dim)
            corrected = store.corrector.in_place(store, layers, rows, segments.segment_indices[part], fit)
            _write(store, heads, seal.Source.of_rows(rows, layout.num_heads, numbers), slots, in_order)
            for one in corrected:
                tables = heads.kept, heads.first, heads.key_blocks
                write_codes(one, store.slabs, slots, *tables, heads.most_kept, layout.form)
        return self._by_layer(chosen, layers, layout)

    @staticmethod
    def _by_layer(chosen: torch.Tensor, layers: Sequence[int], layout: SlabLayout) -> list[torch.Tensor | None]:
        return list(chosen.unflatten(1, (len(layers), layout.num_heads)).unbind(1))


def _parts(source: seal.Source, layout: SlabLayout, segments: int) -> list[slice]:
    """Yield runs of segments whose rows fit in scratch at a time."""
    each = source.num_heads * 2 * layout.segment * layout.head_dim * source.keys.element_size()
    most = max(ROWS_BYTES // each, 1)
    return [slice(first, first + most) for first in range(0, segments, most)]


def _write(
    store: SlabStore, heads: HeadTable, source: seal.Source, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write rows of segments to their slabs. positions: those that heads keep on all ranks, in front."""
    layout = store.layout
    if layout.shared:
        stored = heads.first[:, None] + torch.arange(layout.segment, device=positions.device)
        positions = positions.gather(2, stored.clamp_max_(layout.segment - 1).expand_as(positions))
    kept, blocks, most = heads.kept, heads.key_blocks, heads.most_kept
    seal.gather(source, store.slabs, slots, positions, kept, blocks, most, layout.head_dim, layout.form)


def _token_scores(store: SlabStore, layer: int | None, segments: Finished) -> torch.Tensor:
    """float32 [segments, heads, S], contiguous: what tokens were given when they came. layer: None for all."""
    if isinstance(segments, InTails):
        if layer is None:
            return store.tails.segment_inputs_of_all_layers(segments.pages)[..., 0].contiguous()
        found = store.tails.segment_inputs(layer, segments.pages, segments.req_pool_indices)
        assert found is not None
        return found[..., 0].contiguous()
    assert segments.scorer_inputs is not None, "tokens are scored before their segment is sealed"
    scores = segments.scorer_inputs[..., 0]
    places = segments.places
    if places is None:
        places = segments.firsts[:, None] + torch.arange(store.layout.segment, device=scores.device)
    return scores[places].transpose(1, 2).contiguous()

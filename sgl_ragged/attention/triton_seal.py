"""Sealing by Triton kernels: score, choose and write segments of one layer, or of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.attention.kernels import seal
from sgl_ragged.attention.transfer import head_rows
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import Finished, InTails
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.torch_seal import seal_in_torch


@dataclass(frozen=True)
class HeadTable:
    """Heads as kernels see them, those of one layer or of all.

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


class TritonSealer:
    """`SlabStore.sealer` by kernels: three launches for a scorer that has a kernel."""

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self._layers = [HeadTable.of(layout, slice(n, n + 1), device) for n in range(layout.num_layers)]
        self._every = HeadTable.of(layout, slice(None), device)

    def heads(self, layer: int | None) -> HeadTable:
        return self._every if layer is None else self._layers[layer]

    def __call__(self, store: SlabStore, layers: Sequence[int], segments: Finished) -> list[torch.Tensor | None]:
        if store.corrector is not None:
            # Small dense problems, many at once: torch's batched solvers, without a wait for the device.
            return seal_in_torch(store, layers, segments)
        assert len(layers) in (1, store.layout.num_layers), "a chunk's layer, or all of a decode step's"
        layer = layers[0] if len(layers) == 1 else None
        layout, heads = store.layout, self.heads(layer)
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
        positions = chosen = seal.choose(scores, segments.segment_indices.to(torch.int32), heads.total)
        if layout.shared:
            stored = heads.first[:, None] + torch.arange(layout.segment, device=scores.device)
            positions = positions.gather(2, stored.clamp_max_(layout.segment - 1).expand_as(positions))
        seal.gather(
            source,
            store.slabs,
            segments.slots,
            positions,
            heads.kept,
            heads.key_blocks,
            heads.most_kept,
            layout.head_dim,
            layout.form,
        )
        return list(chosen.unflatten(1, (len(layers), layout.num_heads)).unbind(1))


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

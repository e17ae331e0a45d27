"""The Triton operations, for GPUs. No step waits for the device.

Decode describes its batch in buffers that stay where they are, so that a CUDA graph captured once can be replayed for
other requests. Extend copies one table to the device per batch, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sgl_ragged.attention.cta_map import CtaMap, build_cta_map, cta_table, head_parts, imbalance
from sgl_ragged.attention.kernels import append, decode, describe, extend, gate, quantize_fp8, tiles
from sgl_ragged.attention.kernels.append import GateInputs, Newest
from sgl_ragged.attention.operations import Copies, ExtendBatch, Operations
from sgl_ragged.attention.transfer import head_rows
from sgl_ragged.attention.triton_chains import ChainBatch, ChainRoom
from sgl_ragged.attention.triton_seal import layer_heads
from sgl_ragged.attention.triton_warmup import warm_up
from sgl_ragged.attention.view import DecodeView, ExtendView
from sgl_ragged.mem_pool.layout import Band
from sgl_ragged.mem_pool.segments import InChunk
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers.gate import FoldedGate, Gate

LONG_CONTEXT = 4096
"""Tokens of history from which a short chunk's heads are divided in prefill; below, merging parts is not worth it."""


@dataclass(frozen=True)
class LayerWork:
    """Work of the CTAs of one layer, on the device: `cta_map.cta_table` and `cta_map.head_parts`."""

    ctas: torch.Tensor
    parts: torch.Tensor


@dataclass(frozen=True)
class TritonDecodeBatch:
    """A decode view in the operations' buffers, and the work of each layer's CTAs."""

    view: DecodeView
    work: tuple[LayerWork, ...]


@dataclass(frozen=True)
class TritonExtendBatch(ExtendBatch):
    """work: what the CTAs of each layer do. scratch: for their parts, as `kernels.extend.extend` takes it. places: of
    `chunk_seals`, as `InChunk.places`."""

    work: tuple[LayerWork, ...]
    scratch: tuple[torch.Tensor, torch.Tensor] | None
    places: torch.Tensor | None

    @property
    def lists(self) -> torch.Tensor:
        return self.view.lists


class TritonOps(Operations):
    """Operations by Triton kernels.

    Args:
        cta_map: CTAs per head for each batch bucket, made for the store's layout.
        max_batch: most requests of a decode batch, padding included.
        max_segments: most segments of a sequence.
        chunk_ctas: CTAs of the extend kernel that the device holds at once; 0 leaves heads whole in prefill.
        in_view: as in `Operations`.

    Raises:
        RaggedConfigError: the heads have a shape that the kernels do not take.
    """

    captures_graphs = True
    adds_sinks = True

    def __init__(
        self,
        store: SlabStore,
        cta_map: CtaMap,
        max_batch: int,
        max_segments: int,
        chunk_ctas: int = 0,
        in_view: torch.Tensor | None = None,
    ) -> None:
        super().__init__(store, in_view)
        layout, device = store.layout, store.slabs.device
        tiles.check_shape(layout.head_dim, store.q_per_kv)
        self.cta_map = cta_map
        # Tiles of keys and values have the queries' dtype once they are loaded.
        itemsize = store.query_dtype.itemsize
        self.decode_tile = tiles.decode_tile(layout.head_dim, itemsize, fp8=store.fp8, form=layout.form)
        architecture = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
        self.extend_tile = tiles.extend_tile(layout.head_dim, itemsize, architecture, fp8=store.fp8, form=layout.form)
        self.block_m = self.extend_tile.block_m
        self._heads = layer_heads(layout, device)
        self._gates: list[FoldedGate] = []
        if isinstance(store.scorer, Gate) and store.statistics[0]:
            self._gates = [FoldedGate.of(own) for own in store.statistics]
        self._opens = [_opens(layer, device) for layer in layout.bands]
        self._whole = _layer_work(np.ones_like(layout.kept), layout.kept, device)
        # With more tiles than that, heads left whole fill half of the device or more.
        self._few_tiles = chunk_ctas // (2 * layout.num_heads)
        self._chunk_work: list[tuple[LayerWork, ...]] = []
        if self._few_tiles:
            # Heads that only other ranks store have a CTA, too, which finds no rows.
            chunk_map = build_cta_map(np.maximum(layout.kept, 1), chunk_ctas, range(1, self._few_tiles + 1))
            self._chunk_work = [_layer_work(c, layout.kept, device) for c in chunk_map.counts_by_batch.values()]
        self._places = torch.arange(layout.segment, device=device)
        self._max_segments = max_segments
        self._work: dict[int, tuple[LayerWork, ...]] = {}
        self._max_batch = 0
        self._chains: ChainRoom | None = None
        self.reserve(max_batch)

    def summary(self) -> list[str]:
        counts, kept = self.cta_map.counts_by_batch, np.maximum(self.store.layout.kept, 1)
        ctas = {batch: own.sum(axis=1).max() for batch, own in counts.items()}
        worst = max(imbalance(kept, own).max() for own in counts.values())
        return [
            f"CTA map of {len(ctas)} batch buckets: at most {ctas[min(ctas)]} CTAs per request and layer at batch "
            f"{min(ctas)} and {ctas[max(ctas)]} at batch {max(ctas)}, largest / mean load at most {worst:.2f}",
            f"{self.scratch_bytes} bytes for partial results of decode, outside the KV budget",
        ]

    def reserve(self, max_batch: int) -> None:
        """Make room as in `Operations`. Replaces buffers that are too small, so call it before a graph is captured."""
        if max_batch <= self._max_batch:
            return
        store, device = self.store, self.store.slabs.device
        self._max_batch, self._chains = max_batch, None
        for batch in range(1, max_batch + 1):
            counts = self.cta_map.for_batch(batch)
            if id(counts) not in self._work:
                self._work[id(counts)] = _layer_work(counts, store.layout.kept, device)
        parts = self.cta_map.most_parts(max_batch)
        self._view = DecodeView.empty(max_batch, self._max_segments, store.tails)
        self._partial = torch.empty(parts * store.q_per_kv * store.layout.head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(parts * store.q_per_kv, dtype=torch.float32, device=device)

    @property
    def scratch_bytes(self) -> int:
        """Bytes for the partial results of decode, allocated for the largest batch."""
        return self._partial.nbytes + self._lse.nbytes

    def warm_up(self) -> None:
        """Compile every kernel before a request waits for it."""
        warm_up(self)

    def room(self, batch: int, seq_lens_cpu: torch.Tensor) -> DecodeView:
        """Return buffers at fixed addresses; each view overwrites the one before."""
        if batch > self._max_batch:
            raise RuntimeError(f"a batch of {batch} requests does not fit the buffers, {self._max_batch}")
        return self._view

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> TritonDecodeBatch:
        """Run the step of `Operations` in one launch."""
        room, tails = self.room(len(rows), seq_lens_cpu), self.store.tails
        view = describe.describe(req_to_token, rows, seq_lens, tails.table, tails.segment, room, self.in_view)
        return self.decode_batch(view)

    def decode_batch(self, view: DecodeView) -> TritonDecodeBatch:
        return TritonDecodeBatch(view, self._work[id(self.cta_map.for_batch(len(view)))])

    def extend_batch(self, view: ExtendView) -> TritonExtendBatch:
        batch = self.chunk_batch(view)
        assert batch.tiles is not None
        work, scratch = self._divide_chunks(len(batch.tiles), view.most_seen)
        firsts, places = batch.chunk_seals[0], None
        if len(firsts) and self.store.scorer.scores_tokens_alone:
            # Once for all layers.
            places = firsts[:, None] + self._places
        return TritonExtendBatch(**vars(batch), work=work, scratch=scratch, places=places)

    def look_up(
        self,
        view: ExtendView,
        before: torch.Tensor,
        behind: torch.Tensor,
        in_tails: tuple[torch.Tensor, torch.Tensor],
        in_chunks: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the step of `Operations` in one launch."""
        rows, table = view.req_pool_indices, self.store.tails.table
        return describe.describe_chunks(view.pages, rows, table, before, behind, in_tails, in_chunks)

    def _divide_chunks(
        self, num_tiles: int, most_seen: int
    ) -> tuple[tuple[LayerWork, ...], tuple[torch.Tensor, torch.Tensor] | None]:
        """Return each layer's CTA work in prefill, and scratch. Few tiles with a long history divide heads."""
        long = most_seen * self.store.layout.segment >= LONG_CONTEXT
        return self.divided(num_tiles) if long else (self._whole, None)

    def divided(self, num_tiles: int) -> tuple[tuple[LayerWork, ...], tuple[torch.Tensor, torch.Tensor] | None]:
        """Return work and scratch for divided heads; for whole heads if there are no tiles, or too many."""
        work, rows = self.division(num_tiles)
        return work, self.scratch(rows)

    def division(self, num_tiles: int) -> tuple[tuple[LayerWork, ...], int]:
        """Return work as `divided` does, and the rows of scratch that it takes."""
        if not 0 < num_tiles <= self._few_tiles:
            return self._whole, 0
        work = self._chunk_work[num_tiles - 1]
        return work, num_tiles * max(len(layer.ctas) for layer in work) * self.extend_tile.block_m

    def scratch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return scratch for `rows` query rows; None if 0."""
        device, dim = self.store.slabs.device, self.store.layout.head_dim
        sizes = rows * dim, rows
        partial, lse = (torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
        return (partial, lse) if rows else None

    def describe_chains(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        prefixes: torch.Tensor,
        prefixes_cpu: Sequence[int],
        width: int,
    ) -> ChainBatch:
        """Describe a batch as in `Operations`, on the device alone, in buffers at fixed addresses."""
        if len(rows) > self._max_batch:
            raise RuntimeError(f"a batch of {len(rows)} chains does not fit the buffers, {self._max_batch}")
        if self._chains is None or self._chains.width != width:
            self._chains = ChainRoom(self, self._max_batch, width, self._max_segments)
        return self._chains.describe(req_to_token, rows, prefixes)

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(batch, ChainBatch):
            return self.extend_chunks(layer, queries, keys, values, batch, scorer_inputs, lse, sinks)
        keys, values = self.to_cache(layer, keys, values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        rows = batch.req_pool_indices
        self.store_tokens(layer, keys, values, scorer_inputs, batch.copies, batch.open_pages, rows)
        self.attend_chunks(layer, queries, keys, values, batch, output, lse, sinks)
        return output

    def to_cache(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        store = self.store
        if not store.fp8:
            return store.to_cache(layer, keys, values)
        return quantize_fp8.quantize_fp8(head_rows(keys), head_rows(values), store.kv_scales[layer], store.dtype)

    def room_for_output(self, queries: torch.Tensor, view: ExtendView) -> torch.Tensor:
        if sum(view.lengths) < len(queries):
            return torch.zeros_like(queries, memory_format=torch.contiguous_format)
        # Every token is in a tile, and is written.
        return torch.empty_like(queries, memory_format=torch.contiguous_format)

    def token_inputs(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return inputs as in `Operations`; for `gate`, `FoldedGate.features`, [tokens, features + heads]."""
        if not self._gates:
            return self.token_scores(layer, hidden_states)
        return self._gates[layer].features(hidden_states)

    def made_up_inputs(self, tokens: int, generator: torch.Generator | None = None) -> torch.Tensor | None:
        if not self._gates:
            return super().made_up_inputs(tokens, generator)
        weights = self._gates[0].weights
        return torch.randn((tokens, len(weights)), generator=generator).to(weights)

    def stored_inputs(self, layer: int, scorer_inputs: torch.Tensor) -> torch.Tensor:
        if not self._gates:
            return scorer_inputs
        return self._gates[layer].scores(scorer_inputs)[:, :, None]

    def variants(self, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, TritonExtendBatch) or batch.tiles is None:
            return {}
        work, scratch = self.divided(len(batch.tiles))
        return {} if scratch is None else {", heads in parts": replace(batch, work=work, scratch=scratch)}

    def _gate_inputs(self, layer: int, scorer_inputs: torch.Tensor | None) -> GateInputs | None:
        """Return the append kernel's arguments if the inputs are features."""
        if scorer_inputs is None or scorer_inputs.dim() != 2:
            return None
        return GateInputs(scorer_inputs, self._gates[layer].output, self.store.tails.inputs)

    def seal_chunks(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        batch: ExtendBatch,
    ) -> None:
        firsts, slots, numbers = batch.chunk_seals
        if not len(firsts):
            return
        assert isinstance(batch, TritonExtendBatch)
        if self._gate_inputs(layer, scorer_inputs) is not None:
            assert scorer_inputs is not None
            scorer_inputs = gate.gate_scores(scorer_inputs, self._gates[layer].output)[:, :, None]
        chunk = InChunk(firsts, slots, numbers, keys, values, scorer_inputs, places=batch.places)
        self.store.seal(layer, chunk)

    def store_tokens(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        copies: Copies,
        pages: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        gate_inputs = self._gate_inputs(layer, scorer_inputs)
        if gate_inputs is None:
            self.append_with_inputs(layer, keys, values, scorer_inputs, copies, pages, rows)
            return
        where = copies.tokens, copies.requests, copies.open_offsets, pages
        tails = self.store.tails.data
        append.append(tails, layer, head_rows(keys), head_rows(values), *where, gate=gate_inputs)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, copies: Copies, pages: torch.Tensor) -> None:
        tails = self.store.tails.data
        keys, values = head_rows(keys), head_rows(values)
        append.append(tails, layer, keys, values, copies.tokens, copies.requests, copies.open_offsets, pages)

    def attend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: TritonExtendBatch | ChainBatch,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> object:
        """The attention of `extend` alone, into `output`; what it returns is that of `kernels.extend.extend`."""
        store = self.store
        return extend.extend(
            head_rows(queries),
            head_rows(keys),
            head_rows(values),
            store.slabs,
            store.tails.data,
            layer,
            batch.lists,
            batch.open_pages,
            batch.tiles,
            batch.work[layer].ctas,
            batch.work[layer].parts,
            self._heads[layer].kept,
            self._heads[layer].key_blocks,
            store.logit_scale(layer),
            store.value_scale(layer),
            output,
            batch.scratch,
            self.extend_tile,
            self._opens[layer],
            lse,
            store.layout.form,
            sinks,
        )

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: TritonDecodeBatch,
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        view = batch.view
        newest = self.newest(layer, keys, values, scorer_inputs)
        if scorer_inputs is not None and newest.gate is None:
            self.store.tails.append_inputs(layer, view.pages, view.req_pool_indices, view.open_offsets, scorer_inputs)
        return self.attend(layer, queries, newest, batch, lse, sinks)

    def newest(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, scorer_inputs: torch.Tensor | None = None
    ) -> Newest:
        """Return the values that a decode step writes to the tails, from the arguments of `decode`."""
        scales = self.store.kv_scales[layer] if self.store.fp8 else None
        return Newest(head_rows(keys), head_rows(values), scales, self._gate_inputs(layer, scorer_inputs))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        newest: Newest,
        batch: TritonDecodeBatch,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode attention over slabs, tails and the new tokens, which are written to the tails on the way:
        [batch, heads, q_per_kv, head_dim]."""
        work = batch.work[layer]
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self.attend_parts(layer, queries, newest, batch.view, work)
        decode.combine_parts(self._partial, self._lse, work.parts, len(work.ctas), output, lse, sinks)
        return output

    def attend_parts(
        self, layer: int, queries: torch.Tensor, newest: Newest, view: DecodeView, work: LayerWork
    ) -> object:
        """The first launch of decode attention; what it returns is that of `kernels.decode.decode_parts`."""
        store = self.store
        return decode.decode_parts(
            head_rows(queries),
            newest,
            store.slabs,
            store.tails.data,
            layer,
            view,
            work.ctas,
            self._heads[layer].kept,
            self._heads[layer].key_blocks,
            store.logit_scale(layer),
            store.value_scale(layer),
            self._partial,
            self._lse,
            self.decode_tile,
            self._opens[layer],
            store.layout.form,
        )


def _opens(bands: tuple[Band, ...], device: torch.device) -> torch.Tensor | None:
    """Return int32 [heads], 1 for heads that attend to the open segment here; None if all heads are whole."""
    if not any(band.partial for band in bands):
        return None
    opens = {head: band.attends_open for band in bands for head in band.heads}
    return torch.tensor([opens[head] for head in sorted(opens)], dtype=torch.int32, device=device)


def _layer_work(counts: np.ndarray, kept: np.ndarray, device: torch.device) -> tuple[LayerWork, ...]:
    return tuple(
        LayerWork(
            ctas=torch.tensor(cta_table(row, kept_row), dtype=torch.int32, device=device),
            parts=torch.tensor(head_parts(row), dtype=torch.int32, device=device),
        )
        for row, kept_row in zip(counts, kept, strict=True)
    )

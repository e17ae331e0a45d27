"""The Triton operations: what runs on GPUs. No step waits for the device.

Decode describes its batch in buffers that stay where they are, so that a CUDA graph captured once can be replayed for
other requests. Extend copies one table to the device per batch, whatever the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.attention.extend_tables import extend_tables
from sgl_ragged.attention.kernels import append, decode, extend, seal, tiles
from sgl_ragged.attention.transfer import to_device
from sgl_ragged.layout import Band
from sgl_ragged.mem_pool.slab_store import PendingSeals, SlabStore
from sgl_ragged.split_map import SplitMap, build_split_map, cta_table, head_parts

LONG_HISTORY = 4096
"""Tokens of history from which a short chunk's heads are divided in prefill; below, merging parts is not worth it."""


@dataclass(frozen=True)
class TritonDecodeBatch:
    """Views of the operations' buffers for one decode batch, and the split of each layer.

    rows: int64 [batch]. lengths, places: int32 [batch]. slots: int32 [batch, most segments].
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    splits: tuple[LayerSplit, ...]


@dataclass(frozen=True)
class LayerSplit:
    """One layer's part of the split map on the device: `split_map.cta_table` and `split_map.head_parts`."""

    ctas: torch.Tensor
    parts: torch.Tensor


@dataclass(frozen=True)
class TritonExtendBatch:
    """`ExtendTables` on the device, columns apart; slots and numbers of what is to be sealed.

    splits: how each layer's heads are divided. scratch: for the parts, as `kernels.extend.extend` takes it.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    splits: tuple[LayerSplit, ...]
    scratch: tuple[torch.Tensor, torch.Tensor] | None
    open_copies: tuple[torch.Tensor, ...]
    rest_copies: tuple[torch.Tensor, ...]
    from_tails: _Seals
    from_chunk: _Seals


@dataclass(frozen=True)
class _Seals:
    """Segments to be sealed: rows of their tails or first tokens in the batch, slots, numbers in their sequences."""

    firsts: torch.Tensor
    slots: torch.Tensor
    numbers: torch.Tensor


class TritonOps:
    """`operations.Operations` by Triton kernels.

    Args:
        split_map: CTAs per head for each batch bucket, made for the store's layout.
        max_batch: most requests of a decode batch, padding included.
        max_segments: most segments of a sequence.
        chunk_ctas: CTAs of the extend kernel that the device holds at once; 0 leaves heads whole in prefill.

    Raises:
        RaggedConfigError: the heads have a shape that the kernels do not take.
    """

    captures_graphs = True

    def __init__(
        self, store: SlabStore, split_map: SplitMap, max_batch: int, max_segments: int, chunk_ctas: int = 0
    ) -> None:
        layout, device = store.layout, store.slabs.device
        tiles.check_shape(layout.head_dim, store.q_per_kv)
        self.store = store
        self.split_map = split_map
        itemsize = store.slabs.element_size()
        self.decode_tile = tiles.decode_tile(layout.head_dim, itemsize)
        architecture = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
        self.extend_tile = tiles.extend_tile(layout.head_dim, itemsize, architecture)
        # One tensor a layer, not rows of one: kernels are compiled for addresses that divide by 16.
        self._kept = [torch.tensor(row, dtype=torch.int32, device=device) for row in layout.kept]
        self._key_blocks = [torch.tensor(row // 16, dtype=torch.int64, device=device) for row in layout.key_offset]
        self._total = [torch.tensor(row, dtype=torch.int32, device=device) for row in layout.totals]
        self._first = [torch.tensor(row, dtype=torch.int64, device=device) for row in layout.firsts]
        self._opens = [_opens(layer, device) for layer in layout.bands]
        self._every_kept, self._every_key_blocks = torch.cat(self._kept), torch.cat(self._key_blocks)
        self._every_total, self._every_first = torch.cat(self._total), torch.cat(self._first)
        self._whole = _layer_splits(np.ones_like(layout.kept), layout.kept, device)
        # With more tiles than that, heads left whole fill half of the device or more.
        self._few_tiles = chunk_ctas // (2 * layout.num_heads)
        self._chunk_splits: list[tuple[LayerSplit, ...]] = []
        if self._few_tiles:
            # Heads that only other ranks store have a CTA, too: it finds no rows.
            chunk_map = build_split_map(np.maximum(layout.kept, 1), chunk_ctas, range(1, self._few_tiles + 1))
            self._chunk_splits = [_layer_splits(c, layout.kept, device) for c in chunk_map.counts_by_batch.values()]
        self._max_segments = max_segments
        self._splits: dict[int, tuple[LayerSplit, ...]] = {}
        self._max_batch = 0
        self.reserve(max_batch)

    def reserve(self, max_batch: int) -> None:
        """As in `Operations`. Replaces the buffers if they are too small, so call it before a graph is captured."""
        if max_batch <= self._max_batch:
            return
        store, device = self.store, self.store.slabs.device
        self._max_batch = max_batch
        for batch in range(1, max_batch + 1):
            counts = self.split_map.for_batch(batch)
            if id(counts) not in self._splits:
                self._splits[id(counts)] = _layer_splits(counts, store.layout.kept, device)
        parts = self.split_map.most_parts(max_batch)
        self._rows = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._places = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._slots = torch.zeros((max_batch, self._max_segments), dtype=torch.int32, device=device)
        self._numbers = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._partial = torch.empty(parts * store.q_per_kv * store.layout.head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(parts * store.q_per_kv, dtype=torch.float32, device=device)

    @property
    def scratch_bytes(self) -> int:
        """Bytes for the partial results of decode, allocated for the largest batch."""
        return self._partial.nbytes + self._lse.nbytes

    def warm_up(self) -> None:
        """Compile every kernel before a request waits for it. Writes to row 0 and slot 0, which hold nothing."""
        store, layout = self.store, self.store.layout
        device, length = store.slabs.device, layout.segment + 1
        table = torch.zeros((1, 2 * layout.segment), dtype=torch.int32, device=device)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        keys = store.slabs.new_ones((length, layout.num_heads, layout.head_dim))
        queries = keys[:, :, None].expand(-1, -1, store.q_per_kv, -1).contiguous()
        sides = None
        if store.has_sides:
            sides = store.sides.new_ones((length, layout.num_heads, store.sides.shape[-1]))
        lengths = torch.ones_like(row)
        # Layers with parts of heads have kernels of their own.
        kinds = {opens is None: layer for layer, opens in enumerate(self._opens)}
        for whole, layer in kinds.items():
            lse = None if whole else queries.new_empty(queries.shape[:3], dtype=torch.float32)
            batch = self.describe_extend(table, row, [0], [length])
            self.extend(layer, queries, keys, keys, batch, sides, lse)
            store.defer_seals(PendingSeals(row, row, torch.zeros_like(row)))
            self.seal_pending()
            step = self.describe_decode(table, row, lengths, lengths.cpu())
            first = None if sides is None else sides[:1]
            self.decode(layer, queries[:1], keys[:1], keys[:1], step, first, None if lse is None else lse[:1])

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> TritonDecodeBatch:
        """As in `Operations`; overwrites the buffers that the previous description's views share."""
        size, segment = len(rows), self.store.layout.segment
        batch = TritonDecodeBatch(
            rows=self._rows[:size],
            lengths=self._lengths[:size],
            places=self._places[:size],
            slots=self._slots[:size],
            splits=self._splits[id(self.split_map.for_batch(size))],
        )
        batch.rows.copy_(rows)
        batch.lengths.copy_(seq_lens)
        torch.remainder((batch.lengths - 1).clamp_min_(0), segment, out=batch.places)
        firsts = req_to_token[:, ::segment][:, : batch.slots.shape[1]].index_select(0, batch.rows)
        batch.slots[:, : firsts.shape[1]].copy_(firsts.div_(segment, rounding_mode="floor"))
        return batch

    def describe_extend(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, prefixes: list[int], lengths: list[int]
    ) -> TritonExtendBatch:
        segment = self.store.layout.segment
        tables = extend_tables(prefixes, lengths, segment, self.store.q_per_kv, self.extend_tile.block_m)
        tail_seals, chunk_seals = tables.tail_seals, tables.chunk_seals
        host = [
            tables.tiles,
            *tables.open_copies.T,
            *tables.rest_copies.T,
            *tail_seals.T,
            *chunk_seals.T,
        ]
        tile_table, *columns = to_device(host, req_to_token.device)
        open_copies, rest_copies = tuple(columns[:3]), tuple(columns[3:6])
        tail_request, tail_segment, chunk_request, chunk_segment, first_token = columns[6:]
        rows = rows.to(torch.int64)
        firsts = req_to_token[:, : tables.most_sealed * segment : segment].index_select(0, rows)
        slots = firsts.div_(segment, rounding_mode="floor")
        splits, scratch = self._divide_chunks(len(tile_table), tables.most_sealed)
        return TritonExtendBatch(
            rows=rows,
            slots=slots,
            tiles=tile_table,
            splits=splits,
            scratch=scratch,
            open_copies=open_copies,
            rest_copies=rest_copies,
            from_tails=_Seals(rows[tail_request], slots[tail_request, tail_segment], tail_segment),
            from_chunk=_Seals(first_token, slots[chunk_request, chunk_segment], chunk_segment),
        )

    def _divide_chunks(
        self, num_tiles: int, most_sealed: int
    ) -> tuple[tuple[LayerSplit, ...], tuple[torch.Tensor, torch.Tensor] | None]:
        """Each layer's split in prefill, and scratch for its parts. Few tiles with a long history divide the heads."""
        store = self.store
        if not 0 < num_tiles <= self._few_tiles or most_sealed * store.layout.segment < LONG_HISTORY:
            return self._whole, None
        splits = self._chunk_splits[num_tiles - 1]
        rows = num_tiles * max(len(split.ctas) for split in splits) * self.extend_tile.block_m
        partial = torch.empty(rows * store.layout.head_dim, dtype=torch.float32, device=store.slabs.device)
        return splits, (partial, torch.empty(rows, dtype=torch.float32, device=store.slabs.device))

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: TritonExtendBatch,
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in `Operations`. Tokens outside the chunks of the batch, if any, get zeros."""
        store = self.store
        # What is scored and read must not depend on whether a token came through the cache: it has the cache's dtype.
        keys, values = _head_rows(keys.to(store.slabs.dtype)), _head_rows(values.to(store.slabs.dtype))
        output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        if len(batch.tiles) == 0:
            return output
        self._append(layer, keys, values, batch.open_copies, batch.rows, sides)
        tails = seal.Source.of_tails(store.tails, batch.from_tails.firsts, layer)
        self._seal(layer, tails, batch.from_tails, sides)
        self._seal(layer, seal.Source.of_chunk(keys, values, batch.from_chunk.firsts), batch.from_chunk, sides)
        self.attend_chunks(layer, queries, keys, values, batch, output, lse)
        self._append(layer, keys, values, batch.rest_copies, batch.rows, sides)
        return output

    def attend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: TritonExtendBatch,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> object:
        """The attention of `extend` alone, into `output`; what it returns is that of `kernels.extend.extend`."""
        store = self.store
        return extend.extend(
            _head_rows(queries),
            _head_rows(keys),
            _head_rows(values),
            store.slabs,
            store.tails,
            layer,
            batch.slots,
            batch.rows,
            batch.tiles,
            batch.splits[layer].ctas,
            batch.splits[layer].parts,
            self._kept[layer],
            self._key_blocks[layer],
            store.scales[layer],
            output,
            batch.scratch,
            self.extend_tile,
            self._opens[layer],
            lse,
        )

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: TritonDecodeBatch,
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        store, size = self.store, len(batch.rows)
        numbers = self._numbers[:size]
        append.append(
            store.tails, layer, _head_rows(keys), _head_rows(values), numbers, numbers, batch.places, batch.rows
        )
        if sides is not None:
            store.append_side(layer, batch.rows, batch.places, sides)
        return self.attend(layer, queries, batch, lse)

    def attend(
        self, layer: int, queries: torch.Tensor, batch: TritonDecodeBatch, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode attention over slabs and tails, the new tokens among them: [batch, heads, q_per_kv, head_dim]."""
        split = batch.splits[layer]
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self.attend_parts(layer, queries, batch, split)
        decode.combine_parts(self._partial, self._lse, split.parts, len(split.ctas), output, lse)
        return output

    def attend_parts(self, layer: int, queries: torch.Tensor, batch: TritonDecodeBatch, split: LayerSplit) -> object:
        """The first launch of decode attention; what it returns is that of `kernels.decode.decode_parts`."""
        store = self.store
        return decode.decode_parts(
            _head_rows(queries),
            store.slabs,
            store.tails,
            layer,
            batch.slots,
            batch.rows,
            batch.lengths,
            split.ctas,
            self._kept[layer],
            self._key_blocks[layer],
            store.scales[layer],
            self._partial,
            self._lse,
            self.decode_tile,
            self._opens[layer],
        )

    def seal_pending(self) -> None:
        """All layers and segments together: three launches for a scorer that has a kernel."""
        pending = self.store.take_pending()
        if pending is not None:
            seals = _Seals(pending.rows, pending.slots, pending.numbers.to(torch.int32))
            self._seal(None, seal.Source.of_tails(self.store.tails, pending.rows, None), seals, None)

    def _append(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        copies: tuple[torch.Tensor, ...],
        rows: torch.Tensor,
        sides: torch.Tensor | None,
    ) -> None:
        """Write some of a chunk's tokens to the tails; copies are (tokens, requests, places), int32."""
        tokens, requests, places = copies
        append.append(self.store.tails, layer, keys, values, tokens, requests, places, rows)
        if sides is not None and len(tokens):
            self.store.append_side(layer, rows[requests], places, sides[tokens])

    def _seal(self, layer: int | None, source: seal.Source, seals: _Seals, sides: torch.Tensor | None) -> None:
        """Seal segments of one layer, or of all.

        Args:
            sides: of the chunk, [tokens, heads, elements], if the scorer needs them and the source is a chunk.
        """
        if len(seals.firsts) == 0:
            return
        with self.store.seal_meter.sealing(len(seals.firsts), self.store.layout.num_layers if layer is None else 1):
            self._launch_seal(layer, source, seals, sides)

    def _launch_seal(self, layer: int | None, source: seal.Source, seals: _Seals, sides: torch.Tensor | None) -> None:
        """`_seal` of at least one segment."""
        store, segment = self.store, self.store.layout.segment
        kept = self._every_kept if layer is None else self._kept[layer]
        key_blocks = self._every_key_blocks if layer is None else self._key_blocks[layer]
        most_kept = max(int(store.layout.kept[slice(None) if layer is None else layer].max()), 1)
        if store.scorer.name in seal.SCORED:
            scores = seal.score(source, store.scorer.name, segment, store.layout.head_dim)
        else:
            numbers = range(store.layout.num_layers) if layer is None else [layer]
            every = [self._torch_scores(number, source, seals, sides) for number in numbers]
            scores = torch.cat(every, dim=1).float().contiguous()
        total = self._every_total if layer is None else self._total[layer]
        positions = seal.choose(scores, seals.numbers, total)
        if store.layout.shared:
            first = self._every_first if layer is None else self._first[layer]
            stored = first[:, None] + torch.arange(segment, device=first.device)
            positions = positions.gather(2, stored.clamp_max_(segment - 1).expand_as(positions))
        seal.gather(
            source,
            store.slabs,
            seals.slots,
            positions,
            kept,
            key_blocks,
            most_kept,
            store.layout.head_dim,
        )

    def _torch_scores(self, layer: int, source: seal.Source, seals: _Seals, sides: torch.Tensor | None) -> torch.Tensor:
        """Scores [segments, heads, S] of one layer by the scorer's own torch code."""
        store = self.store
        own_sides = None
        if source.keys.dim() == 4:
            tails = store.tails[seals.firsts, layer]
            keys, values = tails[:, 0], tails[:, 1]
            if store.has_sides:
                own_sides = store.sides[seals.firsts, layer, :, : store.side_places]
        else:
            tokens = seals.firsts[:, None] + torch.arange(store.layout.segment, device=seals.firsts.device)
            keys, values = source.keys[tokens].transpose(1, 2), source.values[tokens].transpose(1, 2)
            if sides is not None:
                last = tokens[:, store.layout.segment - store.side_places :]
                own_sides = sides[last].transpose(1, 2).to(store.sides.dtype)
        return store.scorer.score(store.segment_data(layer, seals.numbers, keys, values, own_sides))


def _opens(bands: tuple[Band, ...], device: torch.device) -> torch.Tensor | None:
    """int32 [heads], 1 for heads that attend to the open segment here; None where all heads of the layer are whole."""
    if not any(band.partial for band in bands):
        return None
    opens = {head: band.attends_open for band in bands for head in band.heads}
    return torch.tensor([opens[head] for head in sorted(opens)], dtype=torch.int32, device=device)


def _layer_splits(counts: np.ndarray, kept: np.ndarray, device: torch.device) -> tuple[LayerSplit, ...]:
    return tuple(
        LayerSplit(
            ctas=torch.tensor(cta_table(row, kept_row), dtype=torch.int32, device=device),
            parts=torch.tensor(head_parts(row), dtype=torch.int32, device=device),
        )
        for row, kept_row in zip(counts, kept, strict=True)
    )


def _head_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if all but its first stride are those of a contiguous one, else a contiguous copy."""
    return x if x[0].is_contiguous() else x.contiguous()

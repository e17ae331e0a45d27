"""Slabs and tails: the pool's storage, and the life of a segment in it. Without SGLang.

A segment is open while it is in a tail, pending once decode has filled it, and sealed once its slab is written.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from sgl_ragged.mem_pool.corrected import CodedHeads, CorrectedRows, Rows
from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8, movable, to_fp8
from sgl_ragged.mem_pool.layout import Band, SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.quantise import QuantisedRows, stored_rows
from sgl_ragged.mem_pool.segments import Finished, InChunk, InTails, Sealed
from sgl_ragged.mem_pool.tails import Tails, token_bytes
from sgl_ragged.scorers import Scorer, SegmentData, keep_positions, rank_positions


class Corrector(Protocol):
    """Correct the kept keys and values of segments before they are stored, so that they approximate attention over
    the whole segment."""

    def __call__(
        self, store: SlabStore, layer: int, rows: Rows, order: torch.Tensor, segment_indices: torch.Tensor
    ) -> CorrectedRows:
        """Correct a layer's rows; the given ones do not change.

        Args:
            rows: keys and values of whole segments.
            order: integers [segments, heads, S], positions by rank (`scorers.rank_positions`).
            segment_indices: integers [segments], each segment's number in its sequence.
        """
        ...

    def in_place(
        self,
        store: SlabStore,
        layers: Sequence[int],
        rows: torch.Tensor,
        segment_indices: torch.Tensor,
        steps: Any,
    ) -> list[CodedHeads]:
        """Correct rows of one layer or of all layers: in place if slabs are wide, else return them in codes.

        Args:
            rows: [segments, heads of these layers, 2 (K, V), S, d], each head's kept rows first.
            segment_indices: integers [segments], each segment's number in its sequence.
            steps: `fitting.attention_matching.Steps` that the correction is computed with.
        """
        ...


Sealer = Callable[["SlabStore", Sequence[int], Finished], list[torch.Tensor | None]]
"""Write finished segments of some layers to their slabs; returns `Sealed.chosen`."""

SealListener = Callable[["SlabStore", Sealed], None]
"""Called with the store and the segments that were sealed in it."""


def _input_dtype(scorer: Scorer, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if scorer.reads_hidden_states else dtype


def side_bytes(scorer: Scorer, layout: SlabLayout, q_per_kv: int, dtype: torch.dtype) -> int:
    """Bytes per request row of what the scorer needs of a segment's last tokens; what it needs of every token lies in
    pages. dtype: of queries there (`kv_dtype.beside_cache`)."""
    places, elems = scorer.input_shape(layout.segment, q_per_kv, layout.head_dim)
    if places == layout.segment:
        return 0
    return layout.num_layers * layout.num_heads * (places + 1) * elems * _input_dtype(scorer, dtype).itemsize


def open_pages(
    scorer: Scorer, layouts: Sequence[SlabLayout], q_per_kv: int, dtype: torch.dtype, query_dtype: torch.dtype
) -> OpenPages:
    """Of open segments, which have as many tokens a page on every rank. layouts: of all ranks. Raises
    RaggedConfigError where a page has no room for a token."""
    of_ranks = []
    for layout in layouts:
        shape = scorer.input_shape(layout.segment, q_per_kv, layout.head_dim)
        each = token_bytes(layout, dtype.itemsize, shape, _input_dtype(scorer, query_dtype).itemsize)
        of_ranks.append(OpenPages.of(layout.segment, layout.slab_bytes(dtype.itemsize), each))
    return min(of_ranks, key=lambda pages: pages.tokens)


class SealMeter:
    """Count sealed segments and the host's time around sealing; never waits for the device.

    Sealing goes layer by layer in prefill and over all layers at once after decode, so what is counted is layers of
    segments. `seconds` is the work itself on a CPU, and the time to launch it on a GPU.

    Args:
        num_layers: layers of one segment.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self._layers = 0

    @property
    def segments(self) -> int:
        """Segments whose layers have all been sealed."""
        return self._layers // self._num_layers

    @contextlib.contextmanager
    def sealing(self, segments: int, layers: int = 1) -> Iterator[None]:
        """Measure the sealing of `segments` segments in `layers` layers."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self._layers += segments * layers


def seal_in_torch(store: SlabStore, layers: Sequence[int], segments: Finished) -> list[torch.Tensor | None]:
    """Seal segments in some layers: a `slab_store.Sealer`."""
    return [_seal_layer(store, layer, segments) for layer in layers]


def _seal_layer(store: SlabStore, layer: int, segments: Finished) -> torch.Tensor | None:
    """Seal in one layer; return `rank_positions`, or None if every token is kept."""
    rows, order = store.segment_rows(layer, segments), None
    every_key, every_value = (movable(part) for part in rows)
    parts: Mapping[int, torch.Tensor] = {}
    if any(band.total < store.layout.segment for band in store.layout.bands[layer]):
        scores = store.scorer.score(store.segment_data(layer, segments, rows))
        order = rank_positions(scores, segments.segment_indices == 0)
        if store.corrector is not None:
            corrected = store.corrector(store, layer, (every_key, every_value), order, segments.segment_indices)
            (every_key, every_value), parts = corrected.rows, corrected.parts
    for index, band in enumerate(store.layout.bands[layer]):
        if band.kept == 0:
            continue
        if index in parts:
            store.band_elems(layer, band)[segments.slots.long()] = parts[index]
            continue
        heads = store.band_heads(layer, index)
        keys, values = every_key.index_select(1, heads), every_value.index_select(1, heads)
        stored = slice(band.first, band.first + band.kept)
        if band.total < store.layout.segment:
            assert order is not None, "tokens are chosen from"
            kept = keep_positions(order.index_select(1, heads), band.total)[..., stored]
            places = kept[..., None].expand(*kept.shape, store.layout.head_dim)
            keys, values = keys.gather(2, places), values.gather(2, places)
        else:
            keys, values = keys[:, :, stored], values[:, :, stored]
        store.write_band(layer, band, segments.slots.long(), keys, values)
    return order


class SlabStore:
    """Sealed segments in slabs, open segments in tails, and the work that is due before the next batch.

    A slab is one page of SGLang's pool. It is written once, when its segment is sealed, and is immutable until SGLang
    reuses its page. Tails are stored in pages of the same memory.

    Slabs and tails may be FP8: they then hold keys and values divided by the layer's scales (`to_cache`), and scorers
    read them multiplied by these again (`from_cache`).

    The store is complete once it is constructed: its attributes are final. What changes while it serves changes through
    its methods: `use_kv_scales`, `begin_batch`, `add_seal_listener`, `defer_seals` and the like.

    Args:
        layout: where heads are stored in a slab.
        scorer: ranks the tokens of a segment.
        num_slots: pages of the pool.
        num_rows: rows of SGLang's request table.
        dtype: of the cache, one of `kv_dtype.KV_DTYPES`: of tails, and of slabs that are not quantised.
        device: of all tensors.
        q_per_kv: query heads per head.
        statistics: per layer, the scorer's tensors [heads, ...] by name.
        pages: geometry of open-segment pages; by default that of this layout alone, without other ranks.
        query_dtype: of the model's queries, and of queries that are stored for scorers; the cache's by default. Never
            FP8.
        softmax_scales: per layer, what attention multiplies products of queries and keys by; 1 / sqrt(head_dim) by
            default.
        kv_scales: per layer, what stored FP8 keys and values are multiplied by; 1 by default.
        sealer: writes slabs; `seal_in_torch` by default.
        corrector: corrects kept rows before they are stored; None stores them as they are.

    Attributes:
        slabs: [num_slots, layout.slab_elems], one slab per page, in the cache's dtype, or uint8 where the layout's
            format is quantised.
        tails: the open segments.
        seal_meter: counts sealed segments.
    """

    def __init__(
        self,
        layout: SlabLayout,
        scorer: Scorer,
        num_slots: int,
        num_rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        q_per_kv: int = 1,
        statistics: Sequence[Mapping[str, torch.Tensor]] | None = None,
        pages: OpenPages | None = None,
        query_dtype: torch.dtype | None = None,
        softmax_scales: Sequence[float] | None = None,
        kv_scales: Sequence[KvScales] | None = None,
        sealer: Sealer = seal_in_torch,
        corrector: Corrector | None = None,
    ) -> None:
        self.query_dtype: Final = query_dtype or dtype
        assert not is_fp8(self.query_dtype), "queries are never FP8"
        self.dtype: Final = dtype
        self.fp8: Final = is_fp8(dtype)
        assert not (self.fp8 and layout.form.quantised), "the launcher refuses FP8 tails with quantised slabs"
        self.layout: Final = layout
        self.scorer: Final = scorer
        self.q_per_kv: Final = q_per_kv
        self.statistics: Final = tuple(statistics or [{}] * layout.num_layers)
        self.softmax_scales: Final = tuple(softmax_scales or [layout.head_dim**-0.5] * layout.num_layers)
        self.corrector: Final = corrector
        self.slabs: Final = torch.zeros(
            (num_slots, layout.slab_elems), dtype=torch.uint8 if layout.form.quantised else dtype, device=device
        )
        self.tails: Final = Tails(
            layout,
            self.slabs,
            dtype,
            num_rows,
            pages or open_pages(scorer, [layout], q_per_kv, dtype, self.query_dtype),
            scorer.input_shape(layout.segment, q_per_kv, layout.head_dim),
            _input_dtype(scorer, self.query_dtype),
        )
        self.seal_meter: Final = SealMeter(layout.num_layers)
        self._kv_scales: tuple[KvScales, ...] = tuple(kv_scales or [KvScales()] * layout.num_layers)
        self._sealer = sealer
        self._seal_listeners: list[SealListener] = []
        self._batches = 0
        self._heads = [
            [torch.tensor(band.heads, dtype=torch.int64, device=device) for band in bands] for bands in layout.bands
        ]
        self._totals = torch.tensor(layout.totals, device=device)
        self._pending: list[InTails] = []
        self._deferred: list[Callable[[], None]] = []
        self._deferred_beside: list[Callable[[], None]] = []
        self._scratch = torch.empty(0, dtype=self.slabs.dtype, device=device)

    @property
    def kv_scales(self) -> tuple[KvScales, ...]:
        """Per layer, the factors from stored FP8 keys and values to numbers; a wide cache does not use them."""
        return self._kv_scales

    def use_kv_scales(self, scales: Sequence[KvScales]) -> None:
        """Store and read by other scales, one per layer. The cache must be empty."""
        assert len(scales) == self.layout.num_layers, "one scale per layer"
        self._kv_scales = tuple(scales)

    @property
    def batches(self) -> int:
        """Number of batches that have been described. Memory that one of them is the last to read may be overwritten
        once there are more."""
        return self._batches

    def begin_batch(self) -> None:
        """Count a batch that is about to be described."""
        self._batches += 1

    def add_seal_listener(self, listener: SealListener) -> None:
        """Call `listener` after every seal from now on."""
        self._seal_listeners.append(listener)

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes + self.tails.nbytes

    @property
    def stored_as(self) -> str:
        """Return dtype, FP8 scales and format in words: all that decides the meaning of a slab's bytes."""
        scales = [(one.keys, one.values) for one in self.kv_scales]
        form = f" in {self.layout.form.name}" if self.layout.form.quantised else ""
        return f"{self.dtype} {scales}" if self.fp8 else f"{self.dtype}{form}"

    def logit_scale(self, layer: int) -> float:
        """Factor from products of queries and stored keys to logits."""
        return self.softmax_scales[layer] * self.kv_scales[layer].keys if self.fp8 else self.softmax_scales[layer]

    def value_scale(self, layer: int) -> float | None:
        """Factor from means of stored values to outputs; None where values are stored as they are."""
        return self.kv_scales[layer].values if self.fp8 else None

    def to_cache(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert keys and values of any shape to the cache's dtype; those that have it are unchanged."""
        dtype, scales = self.dtype, self.kv_scales[layer]
        if not self.fp8 or keys.dtype == dtype:
            return keys.to(dtype), values.to(dtype)
        return to_fp8(keys, scales.keys, dtype), to_fp8(values, scales.values, dtype)

    def from_cache(self, layer: int, part: int, stored: torch.Tensor) -> torch.Tensor:
        """Convert stored keys (part 0) or values (1) to numbers: float32 if FP8, else unchanged."""
        if not self.fp8:
            return stored
        scales = self.kv_scales[layer]
        return stored.float() * (scales.keys, scales.values)[part]

    @property
    def has_scorer_inputs(self) -> bool:
        """True if the scorer needs inputs of every token in addition to its key and value."""
        return self.tails.places > 0

    def band_heads(self, layer: int, index: int) -> torch.Tensor:
        """int64 [heads of band]: head numbers of the layer's band `index`, on the device."""
        return self._heads[layer][index]

    def band_elems(self, layer: int, band: Band) -> torch.Tensor:
        """View [num_slots, heads of band, elements] of the band's storage."""
        start = int(self.layout.layer_start[layer]) + band.offset
        width = self.layout.part_elems(band.kept)
        return self.slabs[:, start : start + len(band.heads) * width].unflatten(1, (len(band.heads), width))

    def band_view(self, layer: int, band: Band) -> torch.Tensor:
        """View [num_slots, heads of band, 2 (K, V), kept, head_dim] of the band's storage, which is wide."""
        assert not self.layout.form.quantised, "codes are no numbers of the cache"
        return self.band_elems(layer, band).unflatten(2, (2, band.kept, self.layout.head_dim))

    def gather(self, layer: int, band: Band, slots: torch.Tensor) -> torch.Tensor | QuantisedRows:
        """Rows that a band kept in these slots: [slots, heads of band, 2 (K, V), kept, head_dim], or its quantised rows
        [slots, heads of band, ...].

        The result is scratch memory, valid until the next call: on CPUs, fresh pages for every layer of every
        step cost more than the copy.
        """
        own, count = self.band_elems(layer, band), slots.shape[0]
        heads, elems = own.shape[1:]
        needed = count * heads * elems
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self.slabs.dtype, device=self.slabs.device)
        gathered = self._scratch[:needed].view(count, heads * elems)
        torch.index_select(movable(own.flatten(1)), 0, slots, out=movable(gathered))
        layout, gathered = self.layout, gathered.view(count, heads, elems)
        if layout.form.quantised:
            return QuantisedRows.of(gathered, band.kept, layout.head_dim, layout.form)
        return gathered.unflatten(2, (2, band.kept, layout.head_dim))

    def kept_rows(self, layer: int, band: Band, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows that a band kept in slots, as numbers: [slots, heads of band, 2 (K, V), kept, head_dim]; a copy."""
        layout = self.layout
        if not layout.form.quantised:
            return self.band_view(layer, band)[slots].to(dtype)
        rows = QuantisedRows.of(self.band_elems(layer, band)[slots], band.kept, layout.head_dim, layout.form)
        return torch.stack(rows.restored(), dim=2).to(dtype)

    def write_band(self, layer: int, band: Band, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what a band keeps of segments: keys and values [slots, heads of band, kept, head_dim], as the cache
        holds them, FP8 as bytes."""
        form = self.layout.form
        if form.quantised:
            self.band_elems(layer, band)[slots] = stored_rows(keys, values, form)
            return
        view = movable(self.band_view(layer, band))
        view[slots] = torch.stack([keys, values], dim=2).to(view.dtype)

    def segment_rows(self, layer: int, segments: Finished) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [segments, heads, S, head_dim] of a layer's finished segments, as stored."""
        if isinstance(segments, InTails):
            return self.tails.segments(layer, segments.pages)
        return self._of_segments(segments, segments.keys), self._of_segments(segments, segments.values)

    def segment_data(
        self, layer: int, segments: Finished, rows: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> SegmentData:
        """Build the scorer's view of a layer's finished segments; no other code builds it.

        Args:
            rows: their `segment_rows`, if they are there already.
        """
        keys, values = (
            self.from_cache(layer, part, stored)
            for part, stored in enumerate(self.segment_rows(layer, segments) if rows is None else rows)
        )
        inputs = None
        if isinstance(segments, InTails):
            inputs = self.tails.segment_inputs(layer, segments.pages, segments.req_pool_indices)
        elif segments.scorer_inputs is not None:
            every = self._of_segments(segments, segments.scorer_inputs)
            inputs = every[:, :, self.layout.segment - self.tails.places :].to(self.tails.inputs.dtype)
        queries = token_scores = None
        if inputs is not None and self.scorer.reads_hidden_states:
            token_scores = inputs[..., 0]
        elif inputs is not None:
            queries = inputs.unflatten(-1, (self.q_per_kv, self.layout.head_dim)).transpose(2, 3)
        scale, statistics = self.softmax_scales[layer], self.statistics[layer]
        return SegmentData(keys, values, queries, token_scores, scale, statistics, segments.segment_indices)

    def _of_segments(self, segments: InChunk, tokens: torch.Tensor) -> torch.Tensor:
        """Split a chunk's tokens [tokens, heads, ...] into segments [segments, heads, S, ...]; a view for a run."""
        length = self.layout.segment
        if segments.run is not None:
            own = tokens[segments.run : segments.run + len(segments) * length]
            return own.unflatten(0, (len(segments), length)).transpose(1, 2)
        places = torch.arange(length, device=segments.firsts.device)
        return tokens[segments.firsts[:, None] + places].transpose(1, 2)

    def seal(self, layer: int | None, segments: Finished) -> None:
        """Score finished segments of one layer, or of all, and write what each head keeps here to their slabs."""
        if len(segments):
            layers = range(self.layout.num_layers) if layer is None else [layer]
            with self.seal_meter.sealing(len(segments), len(layers)):
                sealed = Sealed(layers, segments, self._sealer(self, layers, segments), self._totals)
                for listener in self._seal_listeners:
                    listener(self, sealed)

    def defer_seals(self, segments: InTails) -> None:
        """Record segments that the current decode step fills; they are pending until `flush_pending_seals`."""
        self._pending.append(segments)

    def flush_pending_seals(self) -> None:
        """Seal pending segments, then do deferred copies. Call before any later batch, and before a slab is copied.

        SGLang counts a page as full one step before its segment is sealed. Its pages are free by then, and may be those
        that are copied to.
        """
        if self._pending:
            pending, self._pending = self._pending, []
            segments = pending[0]
            if len(pending) > 1:
                parts = ([getattr(one, name) for one in pending] for name in InTails.__dataclass_fields__)
                segments = InTails(*(torch.cat(part) for part in parts))
            self.tails.stage(segments.slots, segments.pages)
            self.seal(None, segments)
        deferred, self._deferred, self._deferred_beside = [*self._deferred, *self._deferred_beside], [], []
        for copy in deferred:
            copy()

    def defer(self, copy: Callable[[], None]) -> None:
        """Defer a copy of pages to `flush_pending_seals`, in the order of the calls."""
        self._deferred.append(copy)

    def defer_beside(self, copy: Callable[[], None]) -> None:
        """Defer a copy of data outside of pages: after copies of pages, in the order of the calls."""
        self._deferred_beside.append(copy)

    def defer_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Defer a copy of pages `source` to pages `target`, int64 [n] each."""
        self.defer(functools.partial(self.tails.copy, source, target))

    def forget_copies(self) -> None:
        """Forget deferred copies: all pages are free."""
        self._deferred, self._deferred_beside = [], []

    @property
    def has_pending_seals(self) -> bool:
        return bool(self._pending)

    @property
    def has_pending(self) -> bool:
        """True if pages wait to be sealed or copied."""
        return bool(self._pending or self._deferred)

    def append(
        self, layer: int, pages: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens to tails.

        Args:
            pages: integers [tokens, K], of each token's segment. places: integers [tokens], place in it.
            keys, values: [tokens, heads, head_dim], as `to_cache` takes them.
        """
        self.tails.append(layer, pages, places, *self.to_cache(layer, keys, values))

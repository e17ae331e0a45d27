"""Slabs and tails: the storage behind the pool, and the life of a segment in it. Without SGLang.

A segment is open while it is in a tail, pending once decode has filled it, and sealed once its slab is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8, movable, to_fp8
from sgl_ragged.mem_pool.layout import Band, SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.quantise import QuantisedRows, stored_rows
from sgl_ragged.mem_pool.seal_meter import SealMeter
from sgl_ragged.mem_pool.segments import Finished, InChunk, InTails, Sealed
from sgl_ragged.mem_pool.tails import Tails, token_bytes
from sgl_ragged.mem_pool.torch_seal import seal_in_torch
from sgl_ragged.scorers import Scorer, SegmentData

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [segments, heads, S, head_dim], as the cache holds them, FP8 as bytes."""


class Corrector(Protocol):
    """Changes rows of segments before what heads keep of them is stored. numbers: integers [segments], theirs."""

    def __call__(self, layer: int, rows: Rows, order: torch.Tensor, numbers: torch.Tensor) -> Rows:
        """Other rows for a layer's segments. order: what `rank_positions` says of these."""
        ...

    def in_place(self, layers: Sequence[int], rows: torch.Tensor, numbers: torch.Tensor, steps: Any) -> None:
        """Change rows [segments, heads of one layer or of all, 2 (K, V), S, d]; what heads keep is in front.

        steps: `fitting.attention_matching.Steps`, of the caller's.
        """
        ...


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


class SlabStore:
    """Sealed segments in slabs, open segments in tails.

    `slabs` is [num_slots, layout.slab_elems], one slab per SGLang page, of the cache's dtype, or uint8 where the
    layout's format is quantised: keys and values are rounded once, when they are sealed. A slab is written once, when
    its segment is sealed, and is immutable until SGLang reuses its page. `tails` are the open segments, in pages of the
    same memory.

    Slabs and tails may be FP8: they then hold keys and values divided by the layer's scales (`to_cache`), and scorers
    see them multiplied again (`from_cache`).

    Args:
        dtype: of the cache, one of `kv_dtype.KV_DTYPES`: of tails, and of slabs that are not quantised.
        q_per_kv: query heads per head.
        statistics: per layer, the scorer's tensors [heads, ...].
        pages: of open segments, where other ranks have a say in them.
        query_dtype: of the model's queries, those beside the tails among them; the cache's by default. Never FP8.

    `scales` holds per layer what attention multiplies logits by, 1 / sqrt(head_dim), and `kv_scales` what stored keys
    and values are multiplied by, 1, unless the owner of the model says otherwise before anything is stored. `sealer`
    writes slabs: called with the store, layers and segments, it gives `Sealed.chosen`. `on_seal` are called with the
    store and what was sealed after it. `seal_meter` counts what they have done. `corrector` changes what heads keep
    before it is stored; None, where they keep it as it is, unless the owner has a codebook (`fitting`).
    `batches`: how many batches have been described by now; what one of them is the last to read may be overwritten once
    there are more.
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
    ) -> None:
        self.query_dtype = query_dtype or dtype
        assert not is_fp8(self.query_dtype), "queries are never FP8"
        self.dtype = dtype
        self.fp8 = is_fp8(dtype)
        assert not (self.fp8 and layout.form.quantised), "the launcher refuses FP8 tails beside quantised slabs"
        self.layout = layout
        self.scorer = scorer
        self.q_per_kv = q_per_kv
        self.statistics = statistics or [{}] * layout.num_layers
        self.scales = [layout.head_dim**-0.5] * layout.num_layers
        self.kv_scales = [KvScales()] * layout.num_layers
        self.slabs = torch.zeros(
            (num_slots, layout.slab_elems), dtype=torch.uint8 if layout.form.quantised else dtype, device=device
        )
        self.tails = Tails(
            layout,
            self.slabs,
            dtype,
            num_rows,
            pages or open_pages(scorer, [layout], q_per_kv, dtype, self.query_dtype),
            scorer.input_shape(layout.segment, q_per_kv, layout.head_dim),
            _input_dtype(scorer, self.query_dtype),
        )
        self.batches = 0
        self._heads = [
            [torch.tensor(band.heads, dtype=torch.int64, device=device) for band in bands] for bands in layout.bands
        ]
        self.corrector: Corrector | None = None
        self.seal_meter = SealMeter(layout.num_layers)
        self.sealer: Callable[[SlabStore, Sequence[int], Finished], list[torch.Tensor | None]] = seal_in_torch
        self.on_seal: list[Callable[[SlabStore, Sealed], None]] = []
        self._totals = torch.tensor(layout.totals, device=device)
        self._pending: list[InTails] = []
        self._deferred: list[Callable[[], None]] = []
        self._deferred_beside: list[Callable[[], None]] = []
        self._scratch = torch.empty(0, dtype=self.slabs.dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes + self.tails.nbytes

    @property
    def stored_as(self) -> str:
        """Names the dtype, of FP8 the scales, and the format: what decides which numbers a slab's bytes stand for."""
        scales = [(one.keys, one.values) for one in self.kv_scales]
        form = f" in {self.layout.form.name}" if self.layout.form.quantised else ""
        return f"{self.dtype} {scales}" if self.fp8 else f"{self.dtype}{form}"

    def logit_scale(self, layer: int) -> float:
        """Factor from products of queries and stored keys to logits."""
        return self.scales[layer] * self.kv_scales[layer].keys if self.fp8 else self.scales[layer]

    def value_scale(self, layer: int) -> float | None:
        """Factor from means of stored values to outputs; None where values are stored as they are."""
        return self.kv_scales[layer].values if self.fp8 else None

    def to_cache(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of any shape as the cache holds them; those in its dtype already are."""
        dtype, scales = self.dtype, self.kv_scales[layer]
        if not self.fp8 or keys.dtype == dtype:
            return keys.to(dtype), values.to(dtype)
        return to_fp8(keys, scales.keys, dtype), to_fp8(values, scales.values, dtype)

    def from_cache(self, layer: int, part: int, stored: torch.Tensor) -> torch.Tensor:
        """Numbers for stored keys (part 0) or values (1): float32 where they are FP8, else themselves."""
        if not self.fp8:
            return stored
        scales = self.kv_scales[layer]
        return stored.float() * (scales.keys, scales.values)[part]

    @property
    def has_scorer_inputs(self) -> bool:
        """True if the scorer needs something of every token beside its key and value."""
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
        """Keys and values [segments, heads, S, head_dim] of a layer's finished segments, as the cache holds them."""
        if isinstance(segments, InTails):
            return self.tails.segments(layer, segments.pages)
        return self._of_segments(segments, segments.keys), self._of_segments(segments, segments.values)

    def segment_data(
        self, layer: int, segments: Finished, rows: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> SegmentData:
        """Finished segments of a layer as the scorer sees them: the only place that builds this.

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
        scale, statistics = self.scales[layer], self.statistics[layer]
        return SegmentData(keys, values, queries, token_scores, scale, statistics, segments.segment_indices)

    def _of_segments(self, segments: InChunk, tokens: torch.Tensor) -> torch.Tensor:
        """[segments, heads, S, ...] of what a chunk has of each token, [tokens, heads, ...]; a view for a run."""
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
                sealed = Sealed(layers, segments, self.sealer(self, layers, segments), self._totals)
                for listener in self.on_seal:
                    listener(self, sealed)

    def defer_seals(self, segments: InTails) -> None:
        """Record segments that the current decode step fills; they are pending until `flush_pending_seals`."""
        self._pending.append(segments)

    def flush_pending_seals(self) -> None:
        """Seal what is pending, then do what was deferred. Call before any later batch, and before a slab is copied.

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
        """Have pages copied by `flush_pending_seals`, in the order of the calls."""
        self._deferred.append(copy)

    def defer_beside(self, copy: Callable[[], None]) -> None:
        """Have something copied that lies in no page: behind pages, in the order of the calls."""
        self._deferred_beside.append(copy)

    def defer_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Have pages copied to others of the pool, int64 [n] each, as `defer` does."""
        self.defer(functools.partial(self.tails.copy, source, target))

    def forget_copies(self) -> None:
        """Do nothing of what was deferred: all pages are free."""
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

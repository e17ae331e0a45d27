"""A store full of random segments, its request table, and operations on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_ragged.attention.cta_map import build_cta_map
from sgl_ragged.attention.occupancy import resident_ctas
from sgl_ragged.attention.triton_ops import TritonDecodeBatch, TritonOps
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.attention.view import DecodeView
from sgl_ragged.fitting.fitted import StoreFit
from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from sgl_ragged.mem_pool.slab_store import SlabStore, open_pages
from sgl_ragged.scorers import get_scorer

FALLBACK_RESIDENT = 24
"""Resident CTAs where there is no GPU to ask: in the interpreter."""

CODE_SCALE = 1 / 64
"""Of random codes: numbers up to 2."""


@dataclass(frozen=True)
class Stage:
    """A store and the table of its requests: int32 [requests + 1, tokens]; request i has row i + 1."""

    store: SlabStore
    table: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def max_segments(self) -> int:
        return self.table.shape[1] // self.store.layout.segment

    def operations(self, method: str, resident: int, max_batch: int, chunk_ctas: int = 0) -> TritonOps:
        """Operations with a CTA map for batches of `max_batch`; `chunk_ctas` as `TritonOps` takes it."""
        cta_map = build_cta_map(self.store.layout.kept, resident, [max_batch], method)
        return TritonOps(self.store, cta_map, max_batch, self.max_segments, chunk_ctas)

    def decode_batches(self, operations: TritonOps, batch: int, copies: int, length: int) -> list[TritonDecodeBatch]:
        """Descriptions of `copies` batches of different requests, each in buffers of its own."""
        lengths = torch.full((batch,), length, device=self.device)
        described = []
        for copy in range(copies):
            rows = torch.arange(batch, device=self.device) + 1 + copy * batch
            shared = operations.describe_decode(self.table, rows, lengths, lengths.cpu())
            own = {name: getattr(shared.view, name).clone() for name in DecodeView.__dataclass_fields__}
            described.append(replace(shared, view=DecodeView(**own)))
        return described


def make_stage(
    kept: np.ndarray,
    head_dim: int,
    q_per_kv: int,
    segment: int,
    requests: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    scorer: str = "keydiff",
    poisoned: bool = False,
    form: SlabFormat = WIDE,
    cache: torch.dtype | None = None,
    kv_scales: KvScales | None = None,
    codebook: Mapping[str, torch.Tensor] | None = None,
) -> Stage:
    """A store in which each request has the slots for `tokens` tokens, scattered over the slabs, and the pages that its
    open segment and the one before may need beside their own.

    Args:
        dtype: of queries, and of the cache unless `cache` says otherwise.
        poisoned: whether memory is full of NaN, in whatever dtype it is read. Else there are random numbers in slabs
            and in the open segments of requests with `tokens` tokens, as it matters for time what is multiplied.
        kv_scales: of every layer of an FP8 cache.
        codebook: what segments are fitted to, in every layer; None leaves them as chosen.
    """
    segments = -(-tokens // segment)
    count = requests * segments
    layout = SlabLayout(kept=kept, head_dim=head_dim, segment=segment, form=form)
    cache, scales = cache or dtype, [head_dim**-0.5] * layout.num_layers
    most = open_pages(get_scorer(scorer), [layout], q_per_kv, cache, dtype).most
    store = SlabStore(
        layout,
        get_scorer(scorer),
        count + 1 + 2 * requests * most,
        requests + 1,
        cache,
        device,
        q_per_kv=q_per_kv,
        query_dtype=dtype,
        softmax_scales=scales,
        kv_scales=None if kv_scales is None else [kv_scales] * layout.num_layers,
        sealer=TritonSealer(layout, device),
        corrector=StoreFit.from_statistics(layout, [codebook or {}] * layout.num_layers, scales, fp8=is_fp8(cache)),
    )
    slots = torch.randperm(count, device=device).view(requests, segments) + 1
    table = torch.zeros((requests + 1, segments * segment), dtype=torch.int32, device=device)
    table[1:] = (slots[:, :, None] * segment + torch.arange(segment, device=device)).flatten(1)
    beside = torch.randperm(2 * requests * most, device=device) + count + 1
    store.tails.table[1:] = beside.view(requests, 2, most)
    if poisoned:
        store.slabs.view(torch.uint8).fill_(255)
    else:
        _fill_slabs(store.slabs, layout)
        if form.quantised:
            _fill_pages(store.tails.data, torch.cat([slots[:, -1], beside]))
    return Stage(store, table)


def begin_segment(store: SlabStore, row: int) -> None:
    """A request's next segment is open from now on: its pages are the other ones."""
    store.tails.table[row] = store.tails.table[row].flip(0)


def _fill_slabs(storage: torch.Tensor, layout: SlabLayout) -> None:
    """Random numbers; what is bytes holds codes."""
    if storage.dtype == torch.uint8:
        storage.random_(0, 256)
        form, dim = layout.form, layout.head_dim
        row_codes = form.code_bytes(dim)
        for start, kept in zip(layout.key_offset.flat, layout.kept.flat, strict=True):
            # Moments, where the format has them: means of 0, spreads of 1.
            moments = storage[:, start - form.header_elems(dim) : start].view(torch.float16)
            moments[:, : moments.shape[1] // 2], moments[:, moments.shape[1] // 2 :] = 0.0, 1.0
            scales = storage[:, start + kept * row_codes : start + kept * form.row_elems(dim)]
            scales.view(torch.float16).fill_(CODE_SCALE)
    elif is_fp8(storage.dtype):
        # Random numbers are made wide: a part at a time, so that they need no memory to speak of.
        for part in storage.split(64):
            part.copy_(torch.randn(part.shape, device=storage.device))
    else:
        storage.normal_()


def _fill_pages(data: torch.Tensor, pages: torch.Tensor) -> None:
    """Random numbers in some pages of open segments, `Tails.data`, which are as wide as the cache."""
    for part in pages.split(64):
        data[part] = torch.randn((len(part), *data.shape[1:]), device=data.device).to(data.dtype)


def measured_residents(stage: Stage, batch: int) -> tuple[int, object]:
    """Resident CTAs of the decode kernel for this stage's shapes, by launching it once; and the kernel.

    (FALLBACK_RESIDENT, None) in the interpreter.
    """
    store = stage.store
    operations = stage.operations("none", 1, batch)
    ones = torch.ones(batch, dtype=torch.int64, device=stage.device)
    described = operations.describe_decode(stage.table, ones, ones, ones.cpu())
    shape = (batch, store.layout.num_heads, store.q_per_kv, store.layout.head_dim)
    queries = torch.zeros(shape, dtype=store.query_dtype, device=stage.device)
    newest = operations.newest(0, queries[:, :, 0], queries[:, :, 0], operations.made_up_inputs(batch))
    kernel = operations.attend_parts(0, queries, newest, described.view, described.work[0])
    if kernel is None:
        return FALLBACK_RESIDENT, None
    return resident_ctas(kernel, stage.device), kernel

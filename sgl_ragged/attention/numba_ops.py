"""Operations on CPUs whose decode is compiled by numba; the rest is torch."""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl_ragged.attention.numba_decode import DecodeShape, compiled_decode
from sgl_ragged.attention.numba_rows import NUMBERS
from sgl_ragged.attention.torch_ops import TorchOps, scale_values
from sgl_ragged.attention.view import DecodeView
from sgl_ragged.mem_pool.slab_store import SlabStore


@dataclass(frozen=True)
class DecodeBatch:
    """A view of a decode batch, and what of it the kernel takes, as arrays."""

    view: DecodeView
    requests: np.ndarray
    pages: np.ndarray
    open_offsets: np.ndarray
    slots: np.ndarray
    seen: np.ndarray


class NumbaOps(TorchOps):
    """`TorchOps` with decode in one compiled pass per request and head, on as many threads as torch has."""

    def __init__(self, store: SlabStore, in_view: torch.Tensor | None = None) -> None:
        super().__init__(store, in_view)
        layout, form = store.layout, store.layout.form
        kind = "fp8" if store.fp8 else str(store.dtype).removeprefix("torch.")
        self._kernel = compiled_decode(
            DecodeShape(
                form.key_bits, form.value_bits, form.centred, layout.head_dim, store.q_per_kv, layout.segment, kind
            )
        )
        octets, itemsize = store.slabs.view(torch.uint8).flatten().numpy(), store.slabs.element_size()
        # Two bytes at a time are read of codes alone; others may be of an odd number of bytes.
        halves = octets.view(np.uint16) if form.quantised else np.empty(0, np.uint16)
        self._memory = octets.view(NUMBERS[kind]), octets, halves, store.slabs.stride(0) * itemsize
        kept, header = np.array(layout.kept), form.header_elems(layout.head_dim)
        attends_open = (kept > 0) & (layout.firsts == 0)
        self._heads = kept, (layout.key_offset - header * (kept > 0)) * itemsize, attends_open.astype(np.uint8)
        every = torch.arange(256, dtype=torch.uint8)
        self._table = every.view(store.dtype).float().numpy() if store.fp8 else np.empty(0, np.float32)
        # Threads begin with the first batch, so that processes may be forked before.
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1))

    def decode_batch(self, view: DecodeView) -> DecodeBatch:  # type: ignore[override]
        tensors = view.req_pool_indices, view.pages, view.open_offsets, view.slots, view.seen
        return DecodeBatch(view, *(x.numpy() for x in tensors))

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: DecodeBatch,  # type: ignore[override]
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        store, view = self.store, batch.view
        assert lse is not None or self.is_whole(layer), "layers with partial heads need their log-sum-exps"
        if scorer_inputs is not None:
            real = view.req_pool_indices.nonzero()[:, 0]
            rows = (x[real] for x in (view.pages, view.req_pool_indices, view.open_offsets, scorer_inputs))
            store.tails.append_inputs(layer, *rows)
        output = torch.empty(queries.shape)
        lse = torch.empty(queries.shape[:3]) if lse is None else lse
        stored = (_elements(x, self._memory[0].dtype) for x in store.to_cache(layer, keys, values))
        tensors = queries.float().contiguous().numpy(), *stored, output.numpy(), lse.numpy()
        kept, parts, attends_open = (x[layer] for x in self._heads)
        scale = np.float32(store.logit_scale(layer) * math.log2(math.e))
        heads, tokens = len(kept), store.tails.open_pages.tokens
        layer_args = layer, heads, kept, parts, attends_open, tokens
        described = batch.requests, batch.pages, batch.open_offsets, batch.slots, batch.seen
        args = (*self._memory, *layer_args, *described, scale, *tensors, self._table)
        self._run(batch, kept, args)
        scale_values(output, store.value_scale(layer))
        return output.to(queries.dtype)

    def _run(self, batch: DecodeBatch, kept: np.ndarray, args: tuple[Any, ...]) -> None:
        """Compute all pairs of requests and heads, in torch's number of threads, each with as many rows as others."""
        pairs, count = len(batch.view) * len(kept), torch.get_num_threads()
        if count == 1:
            self._kernel(0, pairs, *args)
            return
        rows = (batch.seen[:, None] * kept + batch.open_offsets[:, None] + 1).cumsum()
        borders = np.searchsorted(rows, rows[-1] * np.arange(1, count) / count).tolist()
        own, *others = itertools.pairwise([0, *borders, pairs])
        waiting = [self._threads.submit(self._kernel, *one, *args) for one in others]
        self._kernel(*own, *args)
        for one in waiting:
            one.result()


def _elements(x: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """Return a tensor as integers of the size of its numbers."""
    return x.contiguous().view(torch.uint8).numpy().view(dtype)

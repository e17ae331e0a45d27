"""FlashInfer, where it can be imported: on an uncompressed paged cache, and on slabs by `--ragged-kernel flashinfer`.

All plans are made ahead and are in no time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_blocks.full_cache import PAGE, Attend, FullCache
from benchmarks.gpu_blocks.stage import Stage
from sgl_ragged.attention.flashinfer_ops import FlashInferOps
from sgl_ragged.attention.triton_ops import TritonDecodeBatch

WORKSPACE = 256 << 20


def load() -> Any | None:
    """The module, or None where it cannot be imported."""
    try:
        return importlib.import_module("flashinfer")
    except Exception:
        return None


def version() -> str | None:
    module = load()
    return module and getattr(module, "__version__", "unknown")


@dataclass(frozen=True)
class Pages:
    """A batch's pages: int32 [batch + 1], [pages], [batch], as FlashInfer's plans take them."""

    starts: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor

    @classmethod
    def equal(cls, indices: torch.Tensor, last: int) -> Pages:
        """Requests with equally many pages: `indices` int [batch, pages], `last` entries of each one's last page."""
        batch, each = indices.shape
        starts = torch.arange(batch + 1, dtype=torch.int32, device=indices.device) * each
        lasts = torch.full((batch,), last, dtype=torch.int32, device=indices.device)
        return cls(starts, indices.flatten().int().contiguous(), lasts)


def full_decode(module: Any, cache: FullCache, queries: torch.Tensor) -> Attend:
    """Paged decode on the uncompressed cache; queries [batch, heads, q_per_kv, d]."""
    batch, heads, q_per_kv, dim = queries.shape
    each = -(-cache.length // PAGE)
    indices = torch.arange(batch * each, device=queries.device).view(batch, each)
    pages = Pages.equal(indices, cache.length - (each - 1) * PAGE)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=queries.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(pages.starts),
        paged_kv_indices_buffer=torch.empty_like(pages.indices),
        paged_kv_last_page_len_buffer=torch.empty_like(pages.last),
    )
    wrapper.plan(
        pages.starts.cpu(),
        pages.indices,
        pages.last.cpu(),
        heads * q_per_kv,
        heads,
        dim,
        PAGE,
        q_data_type=queries.dtype,
        kv_data_type=queries.dtype,
    )
    flat = queries.flatten(1, 2)

    def attend(call: int) -> torch.Tensor:
        return wrapper.run(flat, cache.pages(call)).view(queries.shape)

    return attend


def full_extend(module: Any, cache: FullCache, queries: torch.Tensor, heads: int) -> Attend:
    """Paged causal prefill; queries [batch, query heads, chunk, d] as the other baselines take them."""
    batch, query_heads, chunk, dim = queries.shape
    each = -(-cache.length // PAGE)
    indices = torch.arange(batch * each, device=queries.device).view(batch, each)
    pages = Pages.equal(indices, cache.length - (each - 1) * PAGE)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=queries.device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * chunk,
        pages.starts.cpu(),
        pages.indices,
        pages.last.cpu(),
        query_heads,
        heads,
        dim,
        PAGE,
        causal=True,
        q_data_type=queries.dtype,
        kv_data_type=queries.dtype,
    )
    flat = queries.transpose(1, 2).flatten(0, 1).contiguous()

    def attend(call: int) -> torch.Tensor:
        return wrapper.run(flat, cache.pages(call)).view(batch, chunk, query_heads, dim).transpose(1, 2)

    return attend


def slab_decode(
    stage: Stage, queries: torch.Tensor, keys: torch.Tensor, copies: int, length: int
) -> list[Callable[[int], torch.Tensor]]:
    """The project's FlashInfer operations for `copies` batches of different requests: calls from layer to output.

    Each has plans of its own, made here: what the calls take is the device's time alone.
    """
    device, batch = stage.device, len(queries)
    lengths = torch.full((batch,), length, device=device)
    calls = []
    for copy in range(copies):
        operations = FlashInferOps(stage.store, batch, stage.max_segments)
        rows = torch.arange(batch, device=device) + 1 + copy * batch
        described = operations.describe_decode(stage.table, rows, lengths, lengths.cpu())
        calls.append(partial(_attend, operations, queries, keys, described))
    return calls


def _attend(
    operations: FlashInferOps, queries: torch.Tensor, keys: torch.Tensor, batch: TritonDecodeBatch, layer: int
) -> torch.Tensor:
    return operations.decode(layer, queries, keys, keys, batch)

"""FlashInfer, where it can be imported: on an uncompressed paged cache, and band by band on our slabs.

All plans are made ahead, one per distinct (heads, n), and reused over layers. "Ragged" in FlashInfer's names means
contiguous sequences of different lengths, not heads of different lengths: those wrappers are not what is needed here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_blocks.full_cache import PAGE, Attend, FullCache
from benchmarks.gpu_blocks.stage import Stage
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


def _decode_wrapper(
    module: Any, workspace: torch.Tensor, layout: str, pages: Pages, heads: int, q_per_kv: int, dim: int, page: int,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        layout,
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
        page,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return wrapper


def full_decode(module: Any, cache: FullCache, queries: torch.Tensor) -> Attend:
    """Paged decode on the uncompressed cache; queries [batch, heads, q_per_kv, d]."""
    batch, heads, q_per_kv, dim = queries.shape
    each = -(-cache.length // PAGE)
    indices = torch.arange(batch * each, device=queries.device).view(batch, each)
    pages = Pages.equal(indices, cache.length - (each - 1) * PAGE)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=queries.device)
    wrapper = _decode_wrapper(module, workspace, "NHD", pages, heads, q_per_kv, dim, PAGE, queries.dtype)
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


class SlabDecode:
    """Decode on slabs and tails: one call per band of equal n, one for the tail, merged by log-sum-exp.

    Args:
        length: tokens of every request.
        batch: the description of the requests, as the Triton operations have it.
    """

    def __init__(self, module: Any, stage: Stage, queries: torch.Tensor, batch: TritonDecodeBatch, length: int) -> None:
        self.module, self.store, self.queries = module, stage.store, queries
        size, heads, q_per_kv, dim = queries.shape
        segment = self.store.layout.segment
        sealed = (length - 1) // segment
        # Plans of one stream may share their float workspace: they run one after the other.
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=queries.device)
        shape = (q_per_kv, dim)
        tail_pages = Pages.equal(batch.rows.view(size, 1), length - sealed * segment)
        self.tail = _decode_wrapper(module, workspace, "HND", tail_pages, heads, *shape, segment, queries.dtype)
        self.bands: dict[tuple[int, int], Any] = {}
        for band in {(len(b.heads), b.kept) for bands in self.store.layout.bands for b in bands}:
            pages = Pages.equal(batch.slots[:, :sealed], band[1])
            self.bands[band] = _decode_wrapper(module, workspace, "HND", pages, band[0], *shape, band[1], queries.dtype)

    def attend(self, layer: int) -> torch.Tensor:
        tails = self.store.tails[:, layer]
        flat = self.queries.flatten(1, 2).contiguous()
        own, own_lse = self.tail.run(flat, (tails[:, 0], tails[:, 1]), return_lse=True)
        history, history_lse = torch.empty_like(own), torch.empty_like(own_lse)
        for index, band in enumerate(self.store.layout.bands[layer]):
            heads = self.store.band_heads(layer, index)
            view = self.store.band_view(layer, band)
            part, lse = self.bands[len(band.heads), band.kept].run(
                self.queries.index_select(1, heads).flatten(1, 2), (view[:, :, 0], view[:, :, 1]), return_lse=True
            )
            history.view(self.queries.shape)[:, heads] = part.unflatten(1, (len(band.heads), -1))
            history_lse.view(self.queries.shape[:3])[:, heads] = lse.unflatten(1, (len(band.heads), -1))
        merged, _ = self.module.merge_state(history, history_lse, own, own_lse)
        return merged.view(self.queries.shape)

"""Hooks around SGLang's allocation: which requests get the pages of open segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sgl_ragged.launch.plan import WorkerSettings
from sgl_ragged.serve.allocator import SlabAllocator
from sgl_ragged.serve.feature import side_pool
from sgl_ragged.serve.pool import slab_allocator
from sgl_ragged.serve.radix_cache import open_cache_of


def build_allocator(serving: WorkerSettings, original: Callable, *, token_to_kv_pool: Any, **more: Any) -> Any:
    """Build SGLang's allocator and replace it by one that hands out pages to open segments."""
    found = original(token_to_kv_pool=token_to_kv_pool, **more)
    if more["token_to_kv_pool_allocator"] is not None:
        # A draft model shares the locations of the served one.
        return found
    common = {name: getattr(found, name) for name in ("page_size", "dtype", "device", "need_sort")}
    side = side_pool(serving.served_plan)
    if side is not None:
        return side.allocator(found, token_to_kv_pool, common)
    assert type(found) is PagedTokenToKVPoolAllocator, f"SGLang chose {type(found).__name__}"
    return SlabAllocator(found.size, kvcache=token_to_kv_pool, **common)


def alloc_for_extend(original: Callable, batch: Any) -> Any:
    """Give open segments their pages, once the requests of a prefill batch have rows."""
    cache, allocator = open_cache_of(batch), slab_allocator(batch.token_to_kv_pool_allocator)
    hits = {} if cache is None else cache.take_hits(batch.reqs)
    allocator.cut = batch.chunked_req
    found = original(batch)
    rows = found[2].tolist()
    for index, pages in hits.items():
        allocator.open_segments.adopt(rows[index], pages)
    allocator.open_segments.extend(rows, batch.prefix_lens, batch.seq_lens_cpu.tolist(), allocator.take_open_pages())
    return found


def alloc_for_decode(original: Callable, batch: Any, token_per_req: int) -> Any:
    """Give open segments the pages that one more token per request needs."""
    allocator = slab_allocator(batch.token_to_kv_pool_allocator)
    lengths = (batch.seq_lens_cpu + token_per_req).tolist()
    allocator.begin_batch()
    allocator.pending.decode_demand = demand = allocator.open_segments.decode_demand(lengths)
    pages = len(lengths) + demand
    batch.token_to_kv_pool_allocator.evict_to_free_tokens(batch.tree_cache, pages * allocator.page_size)
    found = original(batch, token_per_req)
    allocator.open_segments.decode(batch.req_pool_indices_cpu.tolist(), lengths, allocator.take_open_pages())
    return found

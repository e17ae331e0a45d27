"""SGLang's allocators, which hand out pages to open segments, too; and the hooks that say whose they are.

To SGLang a page is one segment's, and costs as many tokens. A request takes pages beside those while its segment is
open: they are counted in the same tokens, so what SGLang admits and retracts by is what is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sgl_ragged.launch.plan import WorkerSettings
from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.serve.feature import joined_features
from sgl_ragged.serve.pool import slab_allocator
from sgl_ragged.serve.prefill_budget import SlabBudget

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_OPEN = "_sgl_ragged_allocator"
"""Attribute of SGLang's request table that holds the allocator."""


class SlabAllocator(PagedTokenToKVPoolAllocator):
    """Pages of slabs and of open segments. `open_segments` is the pool's.

    resumes: whether requests may begin within a segment, as they do where open segments are kept.
    cut: the request whose prompt the last batch of prefill has cut, if any; SGLang goes on with it.
    """

    free_pages: torch.Tensor

    def __init__(self, *args: Any, **more: Any) -> None:
        kvcache = more["kvcache"]
        self.open_segments: OpenSegments = kvcache.open_segments
        self._reserved = torch.empty(0, dtype=torch.int64, device=more["device"])
        self.resumes = True
        self.cut: Req | None = None
        self._ahead = False
        super().__init__(*args, **more)

    def available_size(self) -> int:
        return super().available_size() + self.open_segments.returning * self.page_size

    def clear(self) -> None:
        super().clear()
        self.open_segments.reset()
        self.cut = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._take_back()
        return super().alloc(need_size)

    def alloc_extend(
        self, prefix_lens: Any, prefix_lens_cpu: Any, seq_lens: Any, seq_lens_cpu: Any, *args: Any, **more: Any
    ) -> torch.Tensor | None:
        lengths = lists(prefix_lens_cpu, seq_lens_cpu)
        demand = 0 if self._ahead else self.open_segments.extend_demand(*lengths)
        given = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        return self._with_reserve(demand, lambda: super(SlabAllocator, self).alloc_extend(*given, *args, **more))

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> torch.Tensor | None:
        demand = self.open_segments.decode_demand(seq_lens_cpu.tolist())
        return self._with_reserve(
            demand, lambda: super(SlabAllocator, self).alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        )

    def take_reserved(self) -> torch.Tensor:
        """Pages of open segments that the last allocation has put aside, int64."""
        pages, self._reserved = self._reserved, self._reserved[:0]
        return pages

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """What is allocated within is for tokens that may never come: open segments take no pages for it."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def take_pages(self, tree_cache: Any, count: int) -> torch.Tensor | None:
        """Pages for open segments, int64 [count], for which cached ones go; None where there are not so many."""
        self.evict_to_free_tokens(tree_cache, count * self.page_size)
        found = self.alloc(count * self.page_size)
        return None if found is None else found[:: self.page_size] // self.page_size

    def _with_reserve(self, demand: int, allocate: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Allocate, and put pages aside for open segments; nothing where there are not enough for both."""
        self._take_back()
        assert not len(self._reserved), "pages were put aside, and nobody took them"
        if demand:
            self.merge_and_sort_free()
        before = self.free_pages
        found = allocate()
        if found is None or not demand:
            return found
        if demand > len(self.free_pages):
            self.free_pages = before
            return None
        self._reserved, self.free_pages = self.free_pages[:demand], self.free_pages[demand:]
        return found

    def _take_back(self) -> None:
        for pages in self.open_segments.take_back():
            self._release_page_ids(pages)

    # What SGLang asks before it allocates.

    def create_prefill_budget(self, tree_cache: Any, **more: Any) -> Any:
        self.resumes = begin_batch(tree_cache)
        return SlabBudget(self, tree_cache, **more)

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        # A request with a row goes on with its prompt. More than 0 would have SGLang leave it out of a batch by an
        # estimate of what others may come to need, and lose the first token of its answer; `SlabBudget` pays for it.
        return 0 if has_req_pool_slot else self.open_reserve()

    def open_reserve(self) -> int:
        """Tokens that a request may come to need besides those of its segments, one page each."""
        return reserve_tokens(self)

    def next_chunk_pages(self, tokens: int) -> int:
        """Pages that the next chunk of the cut prompt takes, if it has this many tokens."""
        assert self.cut is not None, "SGLang goes on with a prompt that no batch has cut"
        start, end = self.cut.prefix_len, self.cut.prefix_len + tokens
        slabs = -(-end // self.page_size) - -(-start // self.page_size)
        return slabs + self.open_segments.extend_demand([start], [end])

    def max_new_tokens_for_memory(self, *args: Any, **more: Any) -> int | None:
        return clipped_new_tokens(self, super().max_new_tokens_for_memory, *args, **more)

    def get_extend_allocation_demand(self, prefix_lens_cpu: Any, seq_lens_cpu: Any, **more: Any) -> int:
        tokens = super().get_extend_allocation_demand(prefix_lens_cpu, seq_lens_cpu, **more)
        return tokens if self._ahead else tokens + extend_tokens(self, prefix_lens_cpu, seq_lens_cpu)

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any, requests: Any = None, **more: Any) -> bool:
        beside = decode_tokens(self, requests)
        return super().check_decode_capacity(
            num_tokens=num_tokens + beside, tree_cache=tree_cache, requests=requests, **more
        )


def begin_batch(tree_cache: Any) -> bool:
    """Say to a cache that keeps open segments that what it found before was for nothing. False if it keeps none."""
    from sgl_ragged.serve.radix_cache import OpenRadixCache

    if not isinstance(tree_cache, OpenRadixCache):
        return False
    tree_cache.begin_batch()
    return True


def reserve_tokens(allocator: SlabAllocator) -> int:
    """Tokens that a request may come to need beside those of its segments, one page each."""
    open_segments, size = allocator.open_segments, allocator.page_size
    pages = open_segments.pages.transient if allocator.resumes else open_segments.pages.most
    if open_segments.chains is not None:
        # SGLang allocates pages for two chains ahead, and leaves one page out of account itself.
        ahead = max(-(-2 * open_segments.chains.width // size) - 1, 0)
        pages = max(pages, open_segments.chains.most_pages()) + ahead
    return pages * size


def extend_tokens(allocator: SlabAllocator, prefix_lens_cpu: Any, seq_lens_cpu: Any) -> int:
    """The same of a batch of chunks."""
    lengths = lists(prefix_lens_cpu, seq_lens_cpu)
    return allocator.open_segments.extend_demand(*lengths) * allocator.page_size


def decode_tokens(allocator: SlabAllocator, requests: Any) -> int:
    """The same of the next decode step of some requests."""
    kvs, open_segments = [request.kv for request in requests or ()], allocator.open_segments
    if open_segments.chains is not None:
        demand = open_segments.chains.demand([kv.req_pool_idx for kv in kvs], [kv.kv_committed_len for kv in kvs])
    else:
        demand = open_segments.decode_demand([kv.kv_committed_len + 1 for kv in kvs])
    return demand * allocator.page_size


def clipped_new_tokens(
    allocator: SlabAllocator, original: Callable, input_tokens: int, *args: Any, token_capacity: int, **more: Any
) -> int | None:
    """Tokens that a request may generate where it is alone; None where not even its prompt fits.

    Where requests do not hold all of their history, what fits is not a matter of their length.
    """
    if allocator.get_kvcache().views is not None:
        return original(input_tokens, *args, token_capacity=token_capacity, **more)
    capacity = token_capacity - reserve_tokens(allocator)
    if -(-input_tokens // allocator.page_size) * allocator.page_size + allocator.page_size >= capacity:
        return None
    return original(input_tokens, *args, token_capacity=capacity, **more)


def lists(*lengths: Any) -> tuple[list[int], ...]:
    """Of tensors."""
    return tuple(length.tolist() for length in lengths)


def release_row(table: Any, row: int) -> None:
    """Take the pages of an open segment back from the request that gives up this row of SGLang's table."""
    allocator = getattr(table, _OPEN)
    allocator.free_page_ids(allocator.open_segments.release(row))


# Hooks.


def build_allocator(
    serving: WorkerSettings, original: Callable, configurator: Any, *, token_to_kv_pool: Any, **more: Any
) -> Any:
    """Builds SGLang's allocator, and puts the one in its place that knows of open segments."""
    found = original(configurator, token_to_kv_pool=token_to_kv_pool, **more)
    if more["token_to_kv_pool_allocator"] is not None:
        # A model that runs beside the served one shares its locations.
        return found
    common = {name: getattr(found, name) for name in ("page_size", "dtype", "device", "need_sort")}
    joined = joined_features(serving.served_plan)
    of_features = [feature.allocator(found, token_to_kv_pool, common) for feature, _ in joined]
    made = next((one for one in of_features if one is not None), None)
    if made is None:
        assert type(found) is PagedTokenToKVPoolAllocator, f"SGLang chose {type(found).__name__}"
        made = SlabAllocator(found.size, kvcache=token_to_kv_pool, **common)
    setattr(more["req_to_token_pool"], _OPEN, slab_allocator(made))
    return made


def alloc_for_extend(original: Callable, batch: Any) -> Any:
    """Gives open segments their pages, once the requests of a prefill batch have rows."""
    from sgl_ragged.serve.radix_cache import open_cache_of

    cache, allocator = open_cache_of(batch), slab_allocator(batch.token_to_kv_pool_allocator)
    hits = {} if cache is None else cache.take_hits(batch.reqs)
    allocator.cut = batch.chunked_req
    found = original(batch)
    rows = found[2].tolist()
    for index, pages in hits.items():
        allocator.open_segments.adopt(rows[index], pages)
    allocator.open_segments.extend(rows, batch.prefix_lens, batch.seq_lens_cpu.tolist(), allocator.take_reserved())
    return found


def alloc_for_decode(original: Callable, batch: Any, token_per_req: int) -> Any:
    """Gives open segments their pages for one token more."""
    allocator = slab_allocator(batch.token_to_kv_pool_allocator)
    lengths = (batch.seq_lens_cpu + token_per_req).tolist()
    pages = len(lengths) + allocator.open_segments.decode_demand(lengths)
    begin_batch(batch.tree_cache)
    batch.token_to_kv_pool_allocator.evict_to_free_tokens(batch.tree_cache, pages * allocator.page_size)
    found = original(batch, token_per_req)
    allocator.open_segments.decode(batch.req_pool_indices_cpu.tolist(), lengths, allocator.take_reserved())
    return found


def free_rows(original: Callable, table: Any, indices: list[int]) -> None:
    """Takes the pages of open segments back from requests that give up their rows."""
    for row in indices:
        release_row(table, row)
    original(table, indices)


def uncached_tokens(original: Callable, checker: Any) -> tuple[int, int]:
    """Tokens that requests hold beside the tree, for SGLang's leak checks: open segments' pages among them."""
    full, windows = original(checker)
    allocator = slab_allocator(checker.token_to_kv_pool_allocator)
    return full + allocator.open_segments.in_use * allocator.page_size, windows

"""SGLang's allocator, which hands out pages to open segments, too (`allocation_hooks`).

To SGLang a page holds one segment and counts as many tokens. While its segment is open, a request holds further pages.
They are counted in the same tokens, so SGLang admits and retracts by the pages that exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.serve.pending_batch import PendingBatch
from sgl_ragged.serve.prefill_budget import SlabBudget

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SlabAllocator(PagedTokenToKVPoolAllocator):
    """Allocator of pages for slabs and open segments.

    open_segments: the pool's.

    resumes: True if requests may begin within a segment, as they do where the radix cache keeps open segments.
    pending: the batch that the scheduler puts together.
    cut: the request whose prompt the last batch of prefill has cut, if any; SGLang goes on with it.
    """

    free_pages: torch.Tensor

    def __init__(self, *args: Any, **more: Any) -> None:
        kvcache = more["kvcache"]
        self.open_segments: OpenSegments = kvcache.open_segments
        self.resumes = False
        self.pending = PendingBatch()
        self.cut: Req | None = None
        self._ahead = False
        super().__init__(*args, **more)

    def available_size(self) -> int:
        return super().available_size() + self.open_segments.returning * self.page_size

    def clear(self) -> None:
        super().clear()
        self.open_segments.reset()
        self.cut = None
        for flushed in self.get_kvcache().on_flush:
            flushed()

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for told in self.get_kvcache().on_free:
            for pages in page_ids:
                told(pages)
        super()._release_page_ids(*page_ids)

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
        demand = self.pending.decode_demand
        assert demand is not None, "the hook around SGLang's allocation counts pages first"
        return self._with_reserve(
            demand, lambda: super(SlabAllocator, self).alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        )

    def begin_batch(self) -> None:
        """Forget what was promised to an earlier batch: the scheduler puts another one together."""
        self.pending = PendingBatch()

    def take_open_pages(self) -> torch.Tensor:
        """Return the pages of open segments that the last allocation has set aside, int64."""
        pages = self.pending.take_open_pages()
        return self.free_pages[:0] if pages is None else pages

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Allocate for tokens that may never come, within this context: open segments take no pages for them."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def take_pages(self, tree_cache: Any, count: int) -> torch.Tensor | None:
        """Return pages for open segments, int64 [count], evicting cached ones for them; None if there are too few."""
        self.evict_to_free_tokens(tree_cache, count * self.page_size)
        found = self.alloc(count * self.page_size)
        return None if found is None else found[:: self.page_size] // self.page_size

    def _with_reserve(self, demand: int, allocate: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Allocate and set pages aside for open segments; change nothing and return None if there are too few."""
        self._take_back()
        if demand:
            self.merge_and_sort_free()
        before = self.free_pages
        found = allocate()
        if found is None or not demand:
            return found
        if demand > len(self.free_pages):
            self.free_pages = before
            return None
        self.pending.set_aside(self.free_pages[:demand])
        self.free_pages = self.free_pages[demand:]
        return found

    def _take_back(self) -> None:
        for pages in self.open_segments.take_back():
            self._release_page_ids(pages)

    # Questions of SGLang's scheduler before it allocates.

    def create_prefill_budget(self, tree_cache: Any, **more: Any) -> Any:
        self.begin_batch()
        return SlabBudget(self, tree_cache, **more)

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        # A request with a row goes on with its prompt. With more than 0 SGLang would leave it out of a batch by an
        # estimate of what other requests may come to need, and lose the first token of its answer. `SlabBudget`
        # reserves instead.
        return 0 if has_req_pool_slot else self.open_reserve()

    def open_reserve(self) -> int:
        """Return the tokens that a request may come to need in addition to one page per segment."""
        return reserve_tokens(self)

    def next_chunk_pages(self, tokens: int) -> int:
        """Return the pages that the next chunk of the cut prompt takes, if it has this many tokens."""
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


def reserve_tokens(allocator: SlabAllocator) -> int:
    """Return the tokens that a request may come to need in addition to one page per segment."""
    open_segments, size = allocator.open_segments, allocator.page_size
    pages = open_segments.pages.transient if allocator.resumes else open_segments.pages.most
    if open_segments.chains is not None:
        # SGLang allocates pages for two chains ahead, and leaves one page out of account itself.
        ahead = max(-(-2 * open_segments.chains.width // size) - 1, 0)
        pages = max(pages, open_segments.chains.most_pages()) + ahead
    return pages * size


def extend_tokens(allocator: SlabAllocator, prefix_lens_cpu: Any, seq_lens_cpu: Any) -> int:
    """Return the tokens that open segments need for a batch of chunks."""
    lengths = lists(prefix_lens_cpu, seq_lens_cpu)
    return allocator.open_segments.extend_demand(*lengths) * allocator.page_size


def decode_tokens(allocator: SlabAllocator, requests: Any) -> int:
    """Return the tokens that open segments need for the next decode step of these requests."""
    kvs, open_segments = [request.kv for request in requests or ()], allocator.open_segments
    if open_segments.chains is not None:
        demand = open_segments.chains.demand([kv.req_pool_idx for kv in kvs], [kv.kv_committed_len for kv in kvs])
    else:
        demand = open_segments.decode_demand([kv.kv_committed_len + 1 for kv in kvs])
    return demand * allocator.page_size


def clipped_new_tokens(
    allocator: SlabAllocator, original: Callable, input_tokens: int, *args: Any, token_capacity: int, **more: Any
) -> int | None:
    """Return the tokens that a request may generate if it runs alone; None if not even its prompt fits.

    With bounded histories the length of a request does not decide what fits.
    """
    if allocator.get_kvcache().views is not None:
        return original(input_tokens, *args, token_capacity=token_capacity, **more)
    capacity = token_capacity - reserve_tokens(allocator)
    if -(-input_tokens // allocator.page_size) * allocator.page_size + allocator.page_size >= capacity:
        return None
    return original(input_tokens, *args, token_capacity=capacity, **more)


def lists(*lengths: Any) -> tuple[list[int], ...]:
    """Convert tensors to Python lists."""
    return tuple(length.tolist() for length in lengths)

"""The lives of `tests/bounded_machine.py` for a model with sliding-window layers: SGLang's hybrid allocator and tree.

A page then has a part for slabs and one for windows. SGLang frees the latter by itself, and after every step each is in
one place, too.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from types import SimpleNamespace

import torch
from hypothesis.stateful import invariant
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.windows.pool import RaggedHybridPool
from sgl_ragged.features.windows.sizes import window_pages
from sgl_ragged.profiles.geometry import WindowedLayers
from tests.bounded_machine import LIMIT, NO_OPEN_SEGMENTS, PAGES, SEGMENT, BoundedMachine

WINDOW_PAGES = 22


def lagging(window: int, interval: int) -> HistoryBound:
    return HistoryBound(LIMIT, "value_key_norm", window_pages(window, interval, SEGMENT) - 1)


class WindowedMachine(BoundedMachine):
    """window: tokens before a query that it sees. interval: SGLANG_SWA_EVICTION_INTERVAL."""

    window, interval = 6, 5
    bound = lagging(6 + 1, 5)
    components = (ComponentType.FULL, ComponentType.SWA)

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[int, tuple[int, ...]] = {}
        self.tree.checkpoint = functools.partial(self._checkpoint, self.tree.checkpoint)

    def _checkpoint(self, original: Callable, req: Req, *, up_to: int) -> None:
        """What the tree takes it can find again; without its window it would lie there for nothing."""
        before = req.kv.cache_protected_len
        original(req, up_to=up_to)
        if req.kv.cache_protected_len > before:
            found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", self.tokens(req)))))
            assert found.device_prefix_len >= req.kv.cache_protected_len

    def _allocator(self) -> SWATokenToKVPoolAllocator:
        slabs = SimpleNamespace(
            attached={"history": self.histories},
            size=PAGES * SEGMENT,
            page_size=SEGMENT,
            head_dim=1,
            get_kv_size_bytes=lambda: (0, 0),
            post_capture_active=False,
        )
        pool = RaggedHybridPool(
            slabs,
            WindowedLayers((0,), self.window + 1, 2),
            (1,),
            window_tokens=WINDOW_PAGES * SEGMENT,
            num_heads=1,
            dtype=torch.float32,
            device="cpu",
        )
        made = SWATokenToKVPoolAllocator(
            slabs.size, pool.size_swa, SEGMENT, torch.float32, "cpu", pool, need_sort=False
        )
        made.full_attn_allocator.open_segments = NO_OPEN_SEGMENTS
        return made

    def _allocate(self, pages: int) -> torch.Tensor | None:
        """As SGLang's allocator does for tokens that follow others: pages of both kinds, in step."""
        tokens = pages * SEGMENT
        self.allocator.evict_to_free_tokens(self.tree, tokens)
        if not self.allocator.new_pages_available(pages, pages):
            return None
        found = self.allocator.full_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(found, self.allocator.swa_attn_allocator.alloc(tokens))
        return found

    def _before_decode(self, req: Req) -> None:
        super()._before_decode(req)
        # As `ScheduleBatch.maybe_evict_swa` does.
        freed = req.kv.get_evicted_seqlen(ComponentType.SWA)
        if req.decode_batch_idx >= 1 and req.seqlen - 1 - self.window >= freed + self.interval:
            self.tree.evict_sliding_windows(req, req.seqlen - 1)
        req.decode_batch_idx += 1

    def _window_page(self, req: Req, number: int) -> int:
        """Page of windows that belongs to a request's segment; 0 where there is none."""
        place = self.table.req_to_token[req.kv.req_pool_idx, number * SEGMENT].long()
        return int(self.allocator.full_to_swa_index_mapping[place]) // SEGMENT

    def _seal(self, req: Req, begin: int, end: int) -> None:
        super()._seal(req, begin, end)
        for number in range(begin // SEGMENT, end // SEGMENT):
            self.windows[self._window_page(req, number)] = tuple(self.tokens(req)[: (number + 1) * SEGMENT])

    @invariant()
    def every_page_of_windows_is_in_one_place(self) -> None:
        free = self.allocator.swa_attn_allocator.get_all_free_pages().tolist()
        in_tree = (self.tree.swa_evictable_size() + self.tree.swa_protected_size()) // SEGMENT
        owned = []
        for req in self.running:
            kv = req.kv
            first, last = kv.cache_protected_len // SEGMENT, -(-kv.kv_allocated_len // SEGMENT)
            behind = kv.get_evicted_seqlen(ComponentType.SWA) // SEGMENT
            owned += [self._window_page(req, number) for number in range(max(first, behind), last)]
        assert 0 not in owned
        assert len({*free, *owned}) == len(free) + len(owned) == WINDOW_PAGES - in_tree

    @invariant()
    def windows_are_there(self) -> None:
        for req in self.running:
            done, tokens = req.kv.kv_committed_len, self.tokens(req)
            for number in range(max(done - self.window, 0) // SEGMENT, done // SEGMENT):
                assert self.windows[self._window_page(req, number)] == tuple(tokens[: (number + 1) * SEGMENT])

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.tree.sanity_check()


class LongWindows(WindowedMachine):
    """Windows longer than what never leaves a view, so that pages are held for them alone."""

    window, interval = 21, 9
    bound = lagging(21 + 1, 9)

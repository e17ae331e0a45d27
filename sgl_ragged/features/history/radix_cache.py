"""SGLang's radix cache for requests with bounded histories: pages go back while their request runs.

An unshared page whose segment has left its request's view is freed at once. Pages that are shared through the tree stay
in the tree. The tree takes at most the first `limit` segments of a sequence, and none after a freed page.

In a model with sliding-window layers SGLang frees the page's part for these layers once windows have left it. The
page's other part is freed after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sgl_ragged.features.history.histories import Histories
from sgl_ragged.serve.pool import slab_pool
from sgl_ragged.serve.radix_cache import SlabRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo


class BoundedRadixCache(SlabRadixCache):
    """Radix cache that frees pages while their request runs. histories: bounded histories of the pool's requests."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.histories: Histories = slab_pool(params.token_to_kv_pool_allocator.get_kvcache()).attached["history"]

    def own_segments(self, kv: ReqKvInfo) -> int:
        """Return the pages that a request holds outside of the tree."""
        if not kv.holds_kv:
            return 0
        history = self.histories.get(kv.req_pool_idx)
        allocated = -(-kv.kv_allocated_len // self.page_size) - kv.cache_protected_len // self.page_size
        return allocated - (len(history.returned) if history is not None else 0)

    def open_segment(self, req: Req) -> None:
        """Let a segment leave the request's view, if needed, before the request gets a page for its next one.

        Does nothing where the next token does not open a segment.
        """
        done, rest = divmod(req.kv.kv_committed_len, self.page_size)
        if rest == 0:
            self.histories.advance(req.kv.req_pool_idx, done)
            self._give_back(req.kv)
            self._leave_windows(req, req.kv.kv_committed_len - self.page_size)

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        history = self.histories.get(req.kv.req_pool_idx)
        returned = history.returned if history is not None else ()
        most = min([self.histories.bound.limit, *returned])
        end = min(up_to, most * self.page_size)
        protected = req.kv.cache_protected_len
        super().checkpoint(req, up_to=max(end, protected) if self._can_be_found(req.kv, end) else protected, **kwargs)
        if self.supports_swa() and not req.finished():
            # SGLang moves the windows to the end of the tree's part; they must follow the computed tokens.
            self.evict_sliding_windows(req, up_to - 1)
            self._leave_windows(req, req.prefix_len)
        self._give_back(req.kv)

    def free_kv_row(self, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None:
        # With --strip-thinking-cache a request that was retracted while it was thinking owns fewer tokens than the tree
        # took when the request was prefilled again.
        ranges = [(max(start, kv.cache_protected_len), end) for start, end in ranges]
        history = self.histories.get(kv.req_pool_idx)
        returned = history.returned if history is not None else set()
        super().free_kv_row(kv, [part for start, end in ranges for part in self._without(returned, start, end)])

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self.histories.forget(req.kv.req_pool_idx)
        super().on_release(req, checkpointed=checkpointed)

    def beside_tokens(self) -> int:
        # SGLang counts segments that requests have given back.
        return super().beside_tokens() - self.histories.returned * self.page_size

    def _can_be_found(self, kv: ReqKvInfo, end: int) -> bool:
        """Return True if the tree would find a prefix of `end` tokens, which needs the window before its end."""
        if not self.supports_swa():
            return True
        freed = kv.get_evicted_seqlen(ComponentType.SWA)
        whole = end // self.page_size * self.page_size
        return freed <= kv.swa_dead_lo(self.page_size) or whole - freed >= self.swa_retain_window

    def _leave_windows(self, req: Req, first: int) -> None:
        """Let the tree evict its windows, if no query from position `first` on sees any of them.

        Without a bound, a request's part of the tree ends close to its last token. With a bound it may end much
        earlier, and a pool with one window per request would be too small for both windows.
        """
        if self.supports_swa() and first - self.swa_retain_window >= req.kv.cache_protected_len:
            self.release_swa_prefix_lock(req)

    def _give_back(self, kv: ReqKvInfo) -> None:
        """Free the request's own pages that have left its view, and its windows."""
        history = self.histories.get(kv.req_pool_idx)
        if history is None:
            return
        size, first = self.page_size, kv.cache_protected_len // self.page_size
        leaving = sorted(number for number in history.left - history.returned if number >= first)
        if self.supports_swa():
            freed_windows = kv.get_evicted_seqlen(ComponentType.SWA) // size
            leaving = [number for number in leaving if number < freed_windows]
        if leaving:
            super().free_kv_row(kv, [(number * size, (number + 1) * size) for number in leaving])
            history.returned.update(leaving)

    def _without(self, returned: set[int], start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range of positions without the segments that were given back."""
        parts, size = [], self.page_size
        for number in sorted(returned):
            if start < (number + 1) * size and number * size < end:
                parts.append((start, number * size))
                start = (number + 1) * size
        return [(first, last) for first, last in [*parts, (start, end)] if first < last]


def bounded_cache(context: Any) -> Any:
    """Make the radix cache for SGLang's registry."""
    return create_unified_radix_cache(context, cache_class=BoundedRadixCache)

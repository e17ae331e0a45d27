"""SGLang's radix cache, extended by open segments: a prompt is found to its last token, not to its last border.

A prefix in the tree ends at a border. An entry of `mem_pool.open_cache` may continue it: SGLang sees a longer prefix,
and the part outside of the tree belongs to the request, as with a session. Its pages are copies, so the entry stays for
other requests. When a request ends, its open segment's pages become an entry; when a prompt has been prefilled,
a copy of them does. Entries are evicted before nodes of the tree, to the tier below if there is one (`Below`).
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_ragged.mem_pool.open_cache import LEAST_TOKENS, Entry
from sgl_ragged.serve.allocator import SlabAllocator
from sgl_ragged.serve.pool import slab_allocator

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo

logger = logging.getLogger(__name__)

_HIT = "_sgl_ragged_open_hit"
"""Attribute of a request that holds the `Hit` which was found last for it."""


@dataclass(frozen=True)
class Hit:
    """A prefix of `tokens` tokens of an entry. below: True if its pages are in the tier below."""

    entry: Entry
    tokens: int
    below: bool


class Below(Protocol):
    """Tier for entries that leave the device; `host_tier.open_store.OpenStore` implements it."""

    def clear(self) -> None:
        """Forget everything."""

    def find(self, prefix: int, name: Hashable, tokens: array, end: int) -> tuple[Entry, int] | None:
        """Find an entry as `OpenCache.find` does; its pages are those of this tier."""

    def keep(self, entry: Entry, spared: Collection[Entry]) -> None:
        """Take over an entry of the device, without evicting those in `spared`."""

    def restore(self, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy pages of this tier to pages of the pool, int64 [n] each, when the next batch is described."""


class SlabRadixCache(UnifiedRadixCache):
    """Radix cache of SGLang on a pool of slabs: it frees a request's open segment, and counts open segments' pages."""

    def __init__(self, params: Any) -> None:
        self.slabs: SlabAllocator = slab_allocator(params.token_to_kv_pool_allocator)
        self._rows = params.req_to_token_pool.available_size()
        super().__init__(params)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.slabs.free_page_ids(self.slabs.open_segments.release(req.kv.req_pool_idx))

    def beside_tokens(self) -> int:
        """Return the tokens of pages that are taken in addition to one page per segment; SGLang counts those itself.

        Where no request has a row, pages of requests are a leak, which SGLang's checks have to see.
        """
        open_segments = self.slabs.open_segments
        idle = self.req_to_token_pool.available_size() == self._rows
        return (open_segments.in_use - (open_segments.of_requests if idle else 0)) * self.page_size

    # For SGLang's checks, by which free, evictable, protected and requests' own tokens are the whole pool.

    def protected_size(self) -> int:
        return super().protected_size() + self.beside_tokens()

    def full_protected_size(self) -> int:
        return super().full_protected_size() + self.beside_tokens()


class OpenRadixCache(SlabRadixCache):
    """Radix cache that finds open segments after the last node of a prefix."""

    def __init__(self, params: Any) -> None:
        slabs = slab_allocator(params.token_to_kv_pool_allocator)
        slabs.resumes = True
        self.entries = slabs.open_segments.kept
        self.below: Below | None = None
        # By single tokens, even where drafts are made from hidden states. For these SGLang takes pairs of tokens, since
        # what such a head keeps of a token depends on the next one: it finds one token less, and never another's.
        super().__init__(replace(params, is_eagle=False))
        self._kept_rows: dict[int, int] = {}

    def reset(self) -> None:
        super().reset()
        self.entries.clear()
        if self.below is not None:
            self.below.clear()
        self.slabs.begin_batch()
        self._kept_rows = {}

    # Lookup.

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        key, req, prefix = params.key, params.req, result.device_prefix_len
        # SGLang then drops every hit, but not `cache_protected_len`.
        if envs.SGLANG_RADIX_FORCE_MISS.get():
            return result
        if self.disable or req is None or result.host_hit_length or result.cache_protected_len is not None:
            return result
        count = self._find(req, prefix, (key.extra_key, key.cache_salt), key.token_ids, len(key))
        if not count:
            return result
        return result._replace(device_prefix_len=prefix + count, cache_protected_len=prefix)

    def init_load_back(self, params: Any) -> Any:
        """Load segments from the tier below as SGLang does, and the open segment that follows them."""
        loaded, req = super().init_load_back(params), params.req
        if loaded is None or not super().load_back_is_cache_owned():
            return loaded
        count, node = loaded
        req.kv.cache_protected_len = sealed = req.prefix_len + count
        if not count:
            return loaded
        tokens = req.full_untruncated_fill_ids
        end = req._compute_max_prefix_len(len(tokens))
        return count + self._find(req, sealed, (req.extra_key, req.cache_salt), tokens, end), node

    def load_back_is_cache_owned(self) -> bool:
        """Return False: a loaded open segment is the request's own, so `init_load_back` sets the cache's part."""
        return False

    def _find(self, req: Req, prefix: int, name: Hashable, tokens: array, end: int) -> int:
        """Return the tokens that an entry has for a request after its sealed prefix, up to position `end`."""
        end = min(end, prefix + min(self.slabs.open_segments.reusable, self.page_size - 1))
        tiers = (self.entries, self.below) if self.below is not None else (self.entries,)
        found = [(tier.find(prefix, name, tokens, end), tier is self.below) for tier in tiers]
        # Of equal lengths, the entry on the device.
        hits = [Hit(one[0], one[1], below) for one, below in found if one is not None]
        best = max(hits, key=lambda hit: hit.tokens, default=None)
        if best is None:
            return 0
        self.slabs.pending.found.add(best.entry)
        setattr(req, _HIT, best)
        return best.tokens

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        locations = self.slabs.pending.locations.get(req.rid)
        if locations is None:
            return super().prefix_device_indices(req)
        root = self.root_node_handle(req.extra_key)
        path = self.tree_core.collect_full_device_indices(req.last_node, root)
        assert len(path) == req.kv.cache_protected_len, (req.rid, len(path), req.kv.cache_protected_len)
        return torch.cat([path, locations])

    def take_hits(self, reqs: list[Req]) -> dict[int, torch.Tensor]:
        """Take pages for the open segments that requests of a prefill batch were promised.

        Returns:
            Pages after the first one, int64, by index of the request. The caller owns them; the request the first.
        """
        hits: list[tuple[int, Hit, int]] = []
        for index, req in enumerate(reqs):
            if not req.kv.holds_kv and req.prefix_len > req.kv.cache_protected_len:
                hit: Hit = getattr(req, _HIT)
                assert hit.tokens == req.prefix_len - req.kv.cache_protected_len, (req.rid, hit, req.prefix_len)
                hits.append((index, hit, 1 + self.slabs.open_segments.pages.extra(hit.tokens)))
        pending = self.slabs.pending
        pending.locations, pending.found = {}, {hit.entry for _, hit, _ in hits}
        needed, size = sum(pages for _, _, pages in hits), self.page_size
        if not needed:
            return {}
        self.slabs.evict_to_free_tokens(self, needed * size)
        # Where there is no room for copies of all, the last that needs an entry takes its pages.
        scarce = self.slabs.available_size() < needed * size
        last = {hit.entry: index for index, hit, _ in hits if not hit.below} if scarce else {}
        given: dict[int, torch.Tensor] = {}
        for index, hit, pages in hits:
            entry = hit.entry
            if last.get(entry) == index:
                self.entries.remove(entry)
                own = entry.pages[:pages]
                self.slabs.free_page_ids(entry.pages[pages:])
            elif hit.below:
                assert self.below is not None
                own = self._new_pages(pages)
                self.below.restore(entry.pages[:pages], own)
            else:
                own = self._copied(entry.pages[:pages])
            pending.locations[reqs[index].rid] = own[0] * size + torch.arange(hit.tokens, device=own.device)
            given[index] = own[1:]
            self.entries.reused_tokens += hit.tokens
        pending.found = set()
        return given

    def _copied(self, pages: torch.Tensor, at_once: bool = False) -> torch.Tensor:
        """Copy pages to new ones when the next batch is described. There must be free pages.

        Args:
            at_once: copy at once; no seal or copy may be pending.
        """
        own, store = self._new_pages(len(pages)), self.slabs.open_segments.store
        if at_once:
            store.tails.copy(pages, own)
        else:
            store.defer_copy(pages, own)
        # A draft model's tokens at these locations stay there when the segment is sealed.
        for told in self.slabs.open_segments.on_copy:
            store.defer_beside(functools.partial(told, pages[:1], own[:1]))
        return own

    def _new_pages(self, count: int) -> torch.Tensor:
        own = self.slabs.alloc(count * self.page_size)
        if own is None:
            raise RuntimeError(f"no room for {count} pages of open segments: {self.available_and_evictable_str()}")
        return own[:: self.page_size] // self.page_size

    # Insertion.

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        kv, chains = req.kv, self.slabs.open_segments.chains
        if chains is not None and req.finished():
            chains.settle(kv.req_pool_idx, up_to)
        super().checkpoint(req, up_to=up_to, **kwargs)
        prefix, count = kv.cache_protected_len, up_to - kv.cache_protected_len
        if self.disable or not kv.holds_kv or not 0 < count < self.page_size:
            return
        if count < (self.entries.least(prefix) if req.finished() else LEAST_TOKENS):
            return
        # Tokens beyond these may be on their way already. If they fill the segment, a slab is written there.
        if chains is not None:
            filled = chains.is_sealed(kv.req_pool_idx, up_to)
        else:
            filled = kv.kv_committed_len // self.page_size > up_to // self.page_size
        if filled:
            return
        name, tokens = (req.extra_key, req.cache_salt), req.full_untruncated_fill_ids
        if self.entries.has(prefix, name, tokens, up_to):
            return
        own = self.req_to_token_pool.req_to_token[kv.req_pool_idx, prefix : prefix + 1].long() // self.page_size
        if req.finished():
            extra = self.slabs.open_segments.give_up(kv.req_pool_idx, count)
            self.slabs.free_page_ids(extra[1])
            self._kept_rows[kv.req_pool_idx] = prefix
            self._keep(prefix, name, tokens, up_to, torch.cat([own, extra[0]]))
        elif up_to >= len(req.origin_input_ids):
            pages = torch.cat([own, self.slabs.open_segments.extra_pages(kv.req_pool_idx, count)])
            if self.slabs.available_size() >= 2 * len(pages) * self.page_size:
                # What is computed now may fill the segment, which would be sealed before anything deferred is done.
                at_once = chains is not None and chains.ahead > 0 and not self.slabs.open_segments.store.has_pending
                if chains is not None and chains.may_end(up_to) and not at_once:
                    return
                self._keep(prefix, name, tokens, up_to, self._copied(pages, at_once))

    def _keep(self, prefix: int, name: Hashable, tokens: array, up_to: int, pages: torch.Tensor) -> None:
        for entry in self.entries.add(prefix, name, tokens, up_to, pages):
            self.slabs.free_page_ids(entry.pages)

    def free_kv_row(self, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None:
        prefix = self._kept_rows.pop(kv.req_pool_idx, None)
        if prefix is not None:
            border = prefix + self.page_size
            ranges = [(border if start == prefix else start, end) for start, end in ranges]
            ranges = [(start, end) for start, end in ranges if start < end]
        super().free_kv_row(kv, ranges)

    # Eviction.

    def evict(self, params: Any) -> Any:
        return self._evicted(super().evict, params)

    def evict_for_alloc(self, params: Any, **more: Any) -> Any:
        return self._evicted(super().evict_for_alloc, params, **more)

    def _evicted(self, original: Callable, params: Any, **more: Any) -> Any:
        """Evict entries before nodes of the tree; entries promised to the pending batch go last."""
        size, wanted = self.page_size, params.num_tokens
        freed = self._drop(self.entries.oldest(-(-wanted // size), self.slabs.pending.found))
        result = original(replace(params, num_tokens=max(wanted - freed, 0)), **more)
        result.num_tokens_evicted += freed
        return result

    def _drop(self, entries: list[Entry]) -> int:
        """Evict entries; return the tokens that this frees."""
        for entry in entries:
            if self.below is not None:
                self.below.keep(entry, self.slabs.pending.found)
            self.entries.remove(entry)
            self.slabs.free_page_ids(entry.pages)
        return sum(len(entry.pages) for entry in entries) * self.page_size

    def evictable_size(self) -> int:
        return super().evictable_size() + self.entries.num_pages * self.page_size

    def full_evictable_size(self) -> int:
        return super().full_evictable_size() + self.entries.num_pages * self.page_size


def keep_open_segments(original: Callable, ctx: Any, *, cache_class: Any = None) -> Any:
    """Have SGLang make a cache of this module in place of its own; `OpenRadixCache` if pages hold slabs alone."""
    if cache_class is None and not ctx.disable_radix_cache and not ctx.is_hybrid_swa and not ctx.is_hybrid_ssm:
        return original(ctx, cache_class=OpenRadixCache)
    cause = "sliding windows" if cache_class is None else cache_class.__name__
    logger.info("open segments are not kept as cache (%s): prefixes are found up to their last border", cause)
    return original(ctx, cache_class=cache_class or SlabRadixCache)


def open_cache_of(batch: Any) -> OpenRadixCache | None:
    """Return the cache of a batch if it keeps open segments, or None."""
    return batch.tree_cache if isinstance(batch.tree_cache, OpenRadixCache) else None

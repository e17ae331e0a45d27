"""Random lives of requests with bounded histories, on SGLang's own requests, allocator and radix tree.

There is no model: a page holds the tokens up to its segment's end, and its score is a function of these. After every
step each page is in one place, and what a request sees is what the tokens before it say it must see.
"""

from __future__ import annotations

import zlib
from array import array
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.radix_cache import BoundedRadixCache
from sgl_ragged.serve.pool import slab_allocator
from tests.bounded_oracle import views

SEGMENT, PAGES, ROWS, LIMIT, LONGEST = 4, 40, 4, 5, 120

SERVING = SimpleNamespace(strip_thinking_cache=False)
"""What releasing a request asks of the server's flags, which is not running."""

_rng = np.random.default_rng(3)
TRUNK = _rng.integers(0, 50, LONGEST)
STREAMS = [TRUNK, *(np.concatenate([TRUNK[:at], _rng.integers(0, 50, LONGEST - at)]) for at in (6, 12, 21, 40))]


def score(tokens: list[int]) -> float:
    """Of the segment that ends these tokens."""
    return zlib.crc32(bytes(tokens)) / 2**32


class Pages:
    """What lies in the pages, as `Histories` knows `SegmentScores`."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor([score(list(self.content[slot])) for slot in slots.tolist()])


NO_OPEN_SEGMENTS = SimpleNamespace(in_use=0, of_requests=0, release=lambda row: torch.empty(0, dtype=torch.int64))
"""Open segments are one page each here."""


class BoundedMachine(RuleBasedStateMachine):
    bound = HistoryBound(LIMIT, "value_key_norm")
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table = ReqToTokenPool(
            size=ROWS - 1, max_context_len=SEGMENT * PAGES * 2, device="cpu", enable_memory_saver=False
        )
        self.pages = Pages()
        rows = self.table.req_to_token
        self.histories = Histories(self.bound, rows, SEGMENT, None if self.bound.by_age else self.pages)
        self.allocator = self._allocator()
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=SEGMENT,
            tree_components=self.components,
            sliding_window_size=self.window,
        )
        self.tree = BoundedRadixCache(parameters)
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.count = 0

    def _allocator(self) -> PagedTokenToKVPoolAllocator:
        pool = SimpleNamespace(attached={"history": self.histories})
        made = PagedTokenToKVPoolAllocator(PAGES * SEGMENT, SEGMENT, torch.float32, "cpu", pool, need_sort=False)
        made.open_segments = NO_OPEN_SEGMENTS
        return made

    @staticmethod
    def tokens(req: Req) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def seen(self, tokens: list[int], number: int) -> list[int]:
        """What queries in a segment see, from the tokens before it."""
        ends = range(SEGMENT, number * SEGMENT + 1, SEGMENT)
        scores = [float(i) if self.bound.by_age else score(tokens[:end]) for i, end in enumerate(ends)]
        return views(np.array(scores), LIMIT, self.bound.latest)[number]

    def _allocate(self, pages: int) -> torch.Tensor | None:
        lacking = pages * SEGMENT - self.allocator.available_size()
        if lacking > 0:
            self.tree.evict(EvictParams(num_tokens=lacking))
        return self.allocator.alloc(pages * SEGMENT)

    def _before_decode(self, req: Req) -> None:
        """What SGLang does to a request before it allocates for its next token."""
        self.tree.open_segment(req)

    def _write(self, req: Req, begin: int, end: int) -> bool:
        """Give tokens their places, new pages where segments begin. False if there are not enough pages."""
        new = -(-end // SEGMENT) - -(-begin // SEGMENT)
        found = self._allocate(new) if new else torch.empty(0, dtype=torch.int64)
        if found is None:
            return False
        row = self.table.req_to_token[req.kv.req_pool_idx]
        first = -(-begin // SEGMENT) * SEGMENT
        if begin < first:
            last = int(row[begin - 1])
            row[begin : min(first, end)] = last + 1 + torch.arange(min(first, end) - begin, dtype=torch.int32)
        if end > first:
            row[first:end] = found[: end - first].to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        return True

    def _seal(self, req: Req, begin: int, end: int) -> None:
        for number in range(begin // SEGMENT, end // SEGMENT):
            slot = int(self.table.req_to_token[req.kv.req_pool_idx, number * SEGMENT]) // SEGMENT
            self.pages.content[slot] = tuple(self.tokens(req)[: (number + 1) * SEGMENT])

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        if req in self.running:
            self.running.remove(req)
        release_kv_cache(req, self.tree, checkpoint=checkpoint)

    def _retract(self, req: Req) -> None:
        self._release(req, checkpoint=False)
        req.reset_for_retract()
        self.waiting.append(req)

    def _prefill(self, req: Req, chunk: int) -> None:
        """As the scheduler does it: match, lock, and chunk by chunk allocate, compute, give to the tree."""
        req.refresh_fill_ids()
        prompt = self.tokens(req)
        match_kv_cache(req, self.tree, array("q", prompt[:-1]))
        assert req.prefix_len <= LIMIT * SEGMENT
        req.lock = self.tree.lock(req.last_node)
        req.kv.cache_protected_len = req.prefix_len
        self.table.alloc([req])
        row = req.kv.req_pool_idx
        shared = self.tree.path_device_indices(req.last_node)
        self.table.req_to_token[row, : req.prefix_len] = shared.to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = begin = req.prefix_len
        while begin < len(prompt):
            end = min(begin + chunk, len(prompt))
            if not self._write(req, begin, end):
                self._retract(req)
                return
            seen = self.histories.seen([row], [begin], [end - begin])
            for number in range(begin // SEGMENT, -(-end // SEGMENT)):
                found = seen(0, number) if seen else None
                assert list(range(number) if found is None else found) == self.seen(prompt, number)
            self._seal(req, begin, end)
            req.extend_end = begin = end
            if end < len(prompt):
                checkpoint_kv_cache(req, self.tree)
        req.output_ids.append(int(_rng.integers(50)))
        checkpoint_kv_cache(req, self.tree)
        self.running.append(req)

    @precondition(lambda self: len(self.running) < ROWS - 1)
    @rule(stream=st.sampled_from(range(len(STREAMS))), length=st.integers(1, 60), chunk=st.integers(1, 2 * SEGMENT))
    def admit(self, stream: int, length: int, chunk: int) -> None:
        self.count += 1
        prompt = array("q", STREAMS[stream][:length].tolist())
        self._prefill(Req(str(self.count), "", prompt, SamplingParams(max_new_tokens=200)), chunk)

    @precondition(lambda self: self.waiting and len(self.running) < ROWS - 1)
    @rule(chunk=st.integers(1, 2 * SEGMENT))
    def resume(self, chunk: int) -> None:
        self._prefill(self.waiting.pop(), chunk)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 5 * SEGMENT), seed=st.integers(0, 9))
    def decode(self, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            for req in list(self.running):
                self._before_decode(req)
            for req in list(self.running):
                done = req.kv.kv_committed_len
                if done >= LONGEST or not self._write(req, done, done + 1):
                    (self._finish if done >= LONGEST else self._retract)(req)
            self.histories.refresh()
            for req in self.running:
                length = req.kv.kv_committed_len
                number = (length - 1) // SEGMENT
                line = self.histories.table[req.kv.req_pool_idx]
                assert line[: min(number, LIMIT)].tolist() == self.seen(self.tokens(req), number)
                self._seal(req, length - 1, length)
                req.output_ids.append(int(rng.integers(50)))

    def _finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self._release(req, checkpoint=True)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS), stripped=st.booleans())
    def finish(self, which: int, stripped: bool) -> None:
        """stripped: with --strip-thinking-cache, after an answer that thought: the tree takes the prompt alone."""
        req = self.running[which % len(self.running)]
        SERVING.strip_thinking_cache, req.reasoning_tokens = stripped, int(stripped)
        self._finish(req)
        SERVING.strip_thinking_cache = False

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def abort(self, which: int) -> None:
        self._release(self.running[which % len(self.running)], checkpoint=False)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def retract(self, which: int) -> None:
        self._retract(self.running[which % len(self.running)])

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        self.tree.evict(EvictParams(num_tokens=pages * SEGMENT))

    def _own(self, req: Req) -> dict[int, int]:
        """Page by number, of those that a request holds beside the tree's."""
        history = self.histories.get(req.kv.req_pool_idx)
        returned = history.returned if history is not None else set()
        row = self.table.req_to_token[req.kv.req_pool_idx]
        first, last = req.kv.cache_protected_len // SEGMENT, -(-req.kv.kv_allocated_len // SEGMENT)
        return {n: int(row[n * SEGMENT]) // SEGMENT for n in range(first, last) if n not in returned}

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free = slab_allocator(self.allocator).get_all_free_pages().tolist()
        in_tree = sorted({int(index) // SEGMENT for index in self.tree.all_values_flatten()})
        owned = [page for req in self.running for page in self._own(req).values()]
        assert sorted(free + in_tree + owned) == list(range(1, PAGES + 1))
        for req in self.running:
            assert self.tree.own_segments(req.kv) == len(self._own(req))

    @invariant()
    def what_is_seen_is_there(self) -> None:
        for req in self.running:
            tokens, row = self.tokens(req), self.table.req_to_token[req.kv.req_pool_idx]
            number = req.kv.kv_committed_len // SEGMENT
            for seen in self.seen(tokens, (req.kv.kv_committed_len - 1) // SEGMENT):
                page = int(row[seen * SEGMENT]) // SEGMENT
                assert seen >= number or self.pages.content[page] == tuple(tokens[: (seen + 1) * SEGMENT])

    @invariant()
    def nobody_holds_more_than_the_bound(self) -> None:
        for req in self.running:
            assert len(self._own(req)) <= self.bound.held

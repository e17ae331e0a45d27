"""Random lives of requests whose open segments are cache, on SGLang's own requests, allocation code and radix tree.

Batches are allocated by SGLang's functions within our hooks, and computed by our operations on a real store. After
every step each page is in one place, and what lies in it is what an independent computation says, whoever wrote it.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ragged.attention.operations import commit
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.features.host_tier.open_store import OpenStore
from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import NOW, Tails
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve import allocation_hooks as hooks
from sgl_ragged.serve.allocator import SlabAllocator
from sgl_ragged.serve.radix_cache import OpenRadixCache
from tests.pool_machine import LAYOUT, SEGMENT, STREAMS, VOCABULARY, expected_slab, kv

SCORER, PAGES, ROWS, LONGEST = "h2o", 40, 5, SEGMENT * 6
HOST_PAGES = 8


class OpenMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = ReqToTokenPool(ROWS - 1, SEGMENT * PAGES, "cpu", enable_memory_saver=False)
        self.store = SlabStore(LAYOUT, get_scorer(SCORER), PAGES + 1, ROWS, torch.float32, "cpu")
        self.store.slabs[:] = torch.nan
        self.store.defer_copy = self._promise
        self.open = OpenSegments(self.store)
        self.allocator = SlabAllocator(
            PAGES * SEGMENT,
            page_size=SEGMENT,
            dtype=torch.float32,
            device="cpu",
            kvcache=SimpleNamespace(open_segments=self.open, on_flush=[], on_free=[]),
            need_sort=False,
        )
        self.tree = OpenRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=SEGMENT,
                tree_components=(ComponentType.FULL,),
            )
        )
        host = torch.empty((HOST_PAGES, self.store.slabs[0].nbytes), dtype=torch.uint8)
        self.host = self.tree.below = OpenStore(self.store, host)
        self.on_host = Tails(LAYOUT, host.view(torch.float32), torch.float32, 1, self.open.pages, (0, 0), torch.float32)
        self.operations = TorchOps(self.store)
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.count = 0
        self.found = 0
        self.promised: set[int] = set()

    def _describe(self) -> None:
        self.store.begin_batch()
        self.store.flush_pending_seals()
        self.promised.clear()

    def _promise(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.promised |= set(target.tolist())
        SlabStore.defer_copy(self.store, source, target)

    @staticmethod
    def tokens(req: Req) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def _batch(self, reqs: list[Req], **more: Any) -> SimpleNamespace:
        return SimpleNamespace(
            reqs=reqs,
            device="cpu",
            req_to_token_pool=self.table,
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            chunked_req=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            **more,
        )

    def _fits(self, tokens: int) -> bool:
        return tokens <= self.allocator.available_size() + self.tree.evictable_size()

    def _extend(self, reqs: list[Req], ends: list[int]) -> None:
        """One batch of prefill, allocated and computed."""
        begins = [req.prefix_len for req in reqs]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        seq_lens = torch.tensor(ends)
        batch = self._batch(
            reqs,
            prefix_lens=begins,
            extend_lens=lengths,
            extend_num_tokens=sum(lengths),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
        )
        _, rows, _ = hooks.alloc_for_extend(allocation.alloc_for_extend, batch)
        self._describe()
        described = self.operations.describe_extend(self.table.req_to_token, rows, begins, lengths)
        content = torch.cat([kv(self.tokens(r)[a:b], a) for r, a, b in zip(reqs, begins, ends, strict=True)])
        for layer in range(LAYOUT.num_layers):
            keys, values = content[:, layer, 0], content[:, layer, 1]
            self.operations.extend(layer, keys[:, :, None], keys, values, described, keys)

    def _admit(self, reqs: list[Req], chunk: int) -> None:
        """Match all, then prefill them: the last of them in chunks, the others at once, in the batch of its first."""
        prompts = []
        self.allocator.create_prefill_budget(self.tree)
        for req in reqs:
            req.refresh_fill_ids()
            prompts.append(self.tokens(req))
            match_kv_cache(req, self.tree, array("q", prompts[-1]), max_prefix_len=len(prompts[-1]) - 1)
            if req.kv.cache_protected_len > req.prefix_len or req.prefix_len % SEGMENT == 0:
                req.kv.cache_protected_len = req.prefix_len
        reserve = self.allocator.request_slot_reserve(has_req_pool_slot=False) + SEGMENT
        locks = [self.tree.lock(req.last_node) for req in reqs]
        if not self._fits(sum(len(p) + SEGMENT + reserve for p in prompts)):
            for req, lock in zip(reqs, locks, strict=True):
                self.tree.unlock(lock)
                req.reset_for_retract()
            self.waiting += reqs
            return
        for req, lock in zip(reqs, locks, strict=True):
            req.lock = lock
            self.found += req.prefix_len % SEGMENT
        ends = [len(prompt) for prompt in prompts]
        last, first = reqs[-1], (reqs[-1].prefix_len + chunk) // SEGMENT * SEGMENT
        ends[-1] = first if reqs[-1].prefix_len < first < ends[-1] else ends[-1]
        self._extend(reqs, ends)
        for req, end in zip(reqs, ends, strict=True):
            req.extend_end = end
        while last.extend_end < len(prompts[-1]):
            checkpoint_kv_cache(last, self.tree)
            end = min((last.prefix_len + chunk) // SEGMENT * SEGMENT, len(prompts[-1]))
            end = end if end > last.prefix_len else len(prompts[-1])
            self._extend([last], [end])
            last.extend_end = end
        for req in reqs:
            req.output_ids.append(int(np.random.default_rng(self.count).integers(VOCABULARY)))
            self.running.append(req)
            self._prefilled(req)

    def _prefilled(self, req: Req) -> None:
        """The prompt of a request has been computed."""
        checkpoint_kv_cache(req, self.tree)

    @precondition(lambda self: len(self.running) < ROWS - 2)
    @rule(
        streams=st.lists(st.sampled_from(range(len(STREAMS))), min_size=1, max_size=2),
        length=st.integers(1, SEGMENT * 4 + 5),
        chunk=st.integers(SEGMENT, 3 * SEGMENT),
    )
    def admit(self, streams: list[int], length: int, chunk: int) -> None:
        reqs = []
        for stream in streams:
            self.count += 1
            prompt = array("q", STREAMS[stream][:length].tolist())
            reqs.append(Req(str(self.count), "", prompt, SamplingParams(max_new_tokens=900)))
        self._admit(reqs, chunk)

    @precondition(lambda self: self.running and len(self.running) < ROWS - 2)
    @rule(which=st.integers(0, ROWS), twice=st.booleans(), more=st.integers(1, 40), finished=st.booleans())
    def go_on(self, which: int, twice: bool, more: int, finished: bool) -> None:
        """The next turn of a conversation, once or twice at the same time, whether or not the one before has ended."""
        req = self.running[which % len(self.running)]
        tokens = self.tokens(req)
        if finished:
            self.finish(which)
        reqs = []
        for branch in range(1 + twice):
            self.count += 1
            rest = np.random.default_rng(branch).integers(0, VOCABULARY, more).tolist()
            prompt = array("q", [*tokens, *rest][:LONGEST])
            reqs.append(Req(str(self.count), "", prompt, SamplingParams(max_new_tokens=900)))
        self._admit(reqs, 2 * SEGMENT)

    @precondition(lambda self: self.waiting and len(self.running) < ROWS - 2)
    @rule(chunk=st.integers(SEGMENT, 3 * SEGMENT))
    def resume(self, chunk: int) -> None:
        self._admit([self.waiting.pop()], chunk)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, SEGMENT + 3), seed=st.integers(0, 3))
    def decode(self, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            for req in [req for req in self.running if req.kv.kv_committed_len >= LONGEST]:
                self._finish(req)
            while self.running and not self._has_room():
                self.retract(len(self.running) - 1)
            if not self.running:
                return
            self._step(rng)

    def _step(self, rng: np.random.Generator) -> None:
        self._decode_step()
        for req in self.running:
            req.output_ids.append(int(rng.integers(VOCABULARY)))

    def _has_room(self) -> bool:
        new = sum(SEGMENT for req in self.running if req.kv.kv_committed_len % SEGMENT == 0)
        return self.allocator.check_decode_capacity(num_tokens=new, tree_cache=self.tree, requests=self.running)

    def _decode_step(self) -> None:
        rows = torch.tensor([req.kv.req_pool_idx for req in self.running])
        lengths = torch.tensor([req.kv.kv_committed_len for req in self.running])
        batch = self._batch(
            self.running, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=rows, req_pool_indices_cpu=rows
        )
        hooks.alloc_for_decode(allocation.alloc_for_decode_default, batch, 1)
        self._describe()
        table, lengths = self.table.req_to_token, lengths + 1
        described = self.operations.describe_decode(table, rows, lengths, lengths)
        commit(self.store, table, rows, lengths.tolist())
        ends = lengths.tolist()
        parts = [kv(self.tokens(r)[end - 1 : end], end - 1) for r, end in zip(self.running, ends, strict=True)]
        content = torch.cat(parts)
        for layer in range(LAYOUT.num_layers):
            keys, values = content[:, layer, 0], content[:, layer, 1]
            self.operations.decode(layer, keys[:, :, None], keys, values, described, keys)

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        self.running.remove(req)
        release_kv_cache(req, self.tree, checkpoint=checkpoint)

    def _finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self._release(req, checkpoint=True)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS), late=st.booleans())
    def finish(self, which: int, late: bool = False) -> None:
        """late: as with overlapping batches, whose next step is on its way when a request turns out to have ended."""
        req = self.running[which % len(self.running)]
        if late and self._has_room():
            self._decode_step()
            for other in self.running:
                if other is not req:
                    other.output_ids.append(int(np.random.default_rng(other.kv.kv_committed_len).integers(VOCABULARY)))
        self._finish(req)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def abort(self, which: int) -> None:
        self._release(self.running[which % len(self.running)], checkpoint=False)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def retract(self, which: int) -> None:
        req = self.running[which % len(self.running)]
        self._release(req, checkpoint=False)
        req.reset_for_retract()
        if len(self.tokens(req)) < LONGEST:
            self.waiting.append(req)

    @rule(pages=st.integers(1, 8))
    def evict(self, pages: int) -> None:
        before = self.tree.entries.num_pages, len(self.tree.all_values_flatten())
        self.tree.evict(EvictParams(num_tokens=pages * SEGMENT))
        # Entries first.
        if self.tree.entries.num_pages:
            assert len(self.tree.all_values_flatten()) == before[1]

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.tree.reset()
        self.table.clear()
        self.allocator.clear()

    def _own(self, req: Req) -> list[int]:
        row = self.table.req_to_token[req.kv.req_pool_idx]
        first, last = req.kv.cache_protected_len // SEGMENT, -(-req.kv.kv_allocated_len // SEGMENT)
        return [int(row[number * SEGMENT]) // SEGMENT for number in range(first, last)]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free = self.allocator.get_all_free_pages().tolist()
        in_tree = sorted({int(index) // SEGMENT for index in self.tree.all_values_flatten()})
        entries = [page for entry in self._entries() for page in entry.pages.tolist()]
        owned = [page for req in self.running for page in self._own(req)]
        table = self.store.tails.table
        extra = [page for row, count in self.open._held.items() for page in table[row, NOW, :count].tolist()]
        if self.open.chains is not None:
            extra += [
                page for row, n in self.open.chains._spare.items() for page in self.open.chains._aside[row, :n].tolist()
            ]
        leaving = [page for _, pages in self.open._retired for page in pages.tolist()]
        assert sorted(free + in_tree + entries + owned + extra + leaving) == list(range(1, PAGES + 1))
        # What SGLang counts: free, evictable, the tree's that is in use, and what requests hold.
        tree = self.tree.evictable_size() + self.tree.protected_size()
        assert self.allocator.available_size() + tree + len(owned) * SEGMENT == PAGES * SEGMENT
        assert self.open.held == sum(map(self._held, self.running))

    def _held(self, req: Req) -> int:
        """Pages that a request's open segment must have beside its own."""
        return self.open.pages.extra(req.kv.kv_allocated_len % SEGMENT)

    def _entries(self) -> list[Any]:
        return [entry for own in self.tree.entries._entries.values() for entry in own]

    @invariant()
    def the_host_holds_what_it_took(self) -> None:
        entries = [entry for own in self.host._entries._entries.values() for entry in own]
        pages = [page for entry in entries for page in entry.pages.tolist()]
        assert sorted(pages + self.host._free) == list(range(HOST_PAGES))
        if not self.store._deferred:
            for entry in entries:
                self._check_tail(entry.tokens.tolist(), entry.key[0], entry.pages[None], self.on_host)

    @invariant()
    def open_segments_hold_their_tokens(self) -> None:
        tails = self.store.tails
        for req in self.running:
            begin = self._sealed(req) * SEGMENT
            tokens = self.tokens(req)[begin : req.kv.kv_committed_len]
            if tokens:
                row = torch.tensor([req.kv.req_pool_idx])
                own = self.table.req_to_token[row, begin] // SEGMENT
                pages = tails.pages(row, own, NOW)
                self._check_tail(tokens, begin, pages)
        for entry in self._entries():
            if not self.promised & set(entry.pages.tolist()):
                self._check_tail(entry.tokens.tolist(), entry.key[0], entry.pages[None])

    def _sealed(self, req: Req) -> int:
        """Segments of a request that are slabs, or about to be."""
        return req.kv.kv_committed_len // SEGMENT

    def _check_tail(self, tokens: list[int], begin: int, pages: torch.Tensor, tails: Tails | None = None) -> None:
        expected = kv(tokens, begin).permute(1, 2, 3, 0, 4)
        for layer in range(LAYOUT.num_layers):
            found = (tails or self.store.tails).read(layer, pages, len(tokens))[0]
            np.testing.assert_array_equal(found.numpy(), expected[layer].numpy())

    @invariant()
    def slabs_hold_what_the_oracle_says(self) -> None:
        pending = {slot for seals in self.store._pending for slot in seals.slots.tolist()}
        for req in self.running:
            row = self.table.req_to_token[req.kv.req_pool_idx]
            for number in range(self._sealed(req)):
                slot = int(row[number * SEGMENT]) // SEGMENT
                if slot not in pending:
                    expected = expected_slab(self.tokens(req), number, SCORER)
                    np.testing.assert_array_equal(self.store.slabs[slot].numpy(), expected)

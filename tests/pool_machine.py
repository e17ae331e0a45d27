"""Random lives of requests on SGLang's own allocator, request table and radix tree, with our store behind them.

After every step: no slot is in two places, none is lost, and every live slab and tail holds exactly what an
independent computation says it must.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sgl_ragged.attention.operations import Operations, commit
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.mem_pool.slab_store import Sealer, SlabStore, seal_in_torch
from sgl_ragged.mem_pool.tails import NOW
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.allocator import SlabAllocator
from tests.oracle import Tokens, kept_tokens

SEGMENT, DIM, SLOTS, ROWS, VOCABULARY = 48, 16, 18, 4, 50
LAYOUT = SlabLayout(kept=np.array([[16, 32, 48], [32, 16, 32]]), head_dim=DIM, segment=SEGMENT)
SCORER = "snapkv"

_rng = np.random.default_rng(7)
BY_TOKEN = _rng.normal(size=(VOCABULARY, LAYOUT.num_layers, 2, LAYOUT.num_heads, DIM)).astype(np.float32)
BY_POSITION = _rng.normal(size=(SEGMENT * SLOTS, LAYOUT.num_layers, 2, LAYOUT.num_heads, DIM)).astype(np.float32)
# Prompts are prefixes of a few streams that branch off each other, inside segments and on their borders.
TRUNK = _rng.integers(0, VOCABULARY, SEGMENT * 5)
FORKS = (20, SEGMENT, 2 * SEGMENT + 6)
STREAMS = [TRUNK, *(np.concatenate([TRUNK[:at], _rng.integers(0, VOCABULARY, SEGMENT * 3)]) for at in FORKS)]


def kv(tokens: list[int], start: int) -> torch.Tensor:
    """[tokens, layers, 2, heads, d]: the keys and values that a model would make of tokens at these positions."""
    index = np.asarray(tokens, dtype=np.int64)
    return torch.from_numpy(BY_TOKEN[index] + 0.1 * BY_POSITION[start : start + len(index)])


def expected_slab(tokens: list[int], index: int, scorer: str = SCORER) -> np.ndarray:
    """What the slab of segment `index` of a sequence must hold, flat."""
    start = index * SEGMENT
    content = kv(tokens[start : start + SEGMENT], start).double().numpy()
    slab = np.full(LAYOUT.slab_elems, np.nan, dtype=np.float32)
    for layer in range(LAYOUT.num_layers):
        for head in range(LAYOUT.num_heads):
            count = int(LAYOUT.kept[layer, head])
            keys, values = content[:, layer, 0, head], content[:, layer, 1, head]
            kept = kept_tokens(scorer, Tokens(keys, values, queries=keys[None], scale=DIM**-0.5), count, index == 0)
            for offset, source in ((LAYOUT.key_offset, keys), (LAYOUT.value_offset, values)):
                begin = offset[layer, head]
                slab[begin : begin + count * DIM] = source[kept].ravel()
    assert not np.isnan(slab).any()
    return slab


@dataclass
class Request:
    tokens: list[int]
    row: int
    node: TreeNode
    shared: int
    """Tokens whose pages belong to the tree."""
    pages: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    def make_sealer(self, layout: SlabLayout) -> Sealer:
        return seal_in_torch

    def make_operations(self, store: SlabStore) -> Operations:
        return TorchOps(store)

    def __init__(self) -> None:
        super().__init__()
        sealer = self.make_sealer(LAYOUT)
        self.store = SlabStore(LAYOUT, get_scorer(SCORER), SLOTS, ROWS, torch.float32, "cpu", sealer=sealer)
        self.open = OpenSegments(self.store)
        self.allocator = SlabAllocator(
            (SLOTS - 1) * SEGMENT,
            page_size=SEGMENT,
            dtype=torch.float32,
            device="cpu",
            kvcache=SimpleNamespace(open_segments=self.open, on_flush=[], on_free=[]),
            need_sort=False,
        )
        self.table = ReqToTokenPool(
            size=ROWS - 1, max_context_len=SEGMENT * SLOTS, device="cpu", enable_memory_saver=False
        )
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=SEGMENT,
            )
        )
        self.operations = self.make_operations(self.store)
        self.running: list[Request] = []
        self.retracted: list[list[int]] = []

    def _allocate(self, pages: int) -> torch.Tensor | None:
        """int64 pages, or None where there are not so many."""
        if pages * SEGMENT > self.allocator.available_size():
            self.tree.evict(EvictParams(num_tokens=pages * SEGMENT - self.allocator.available_size()))
        locations = self.allocator.alloc(pages * SEGMENT)
        return None if locations is None else locations[::SEGMENT] // SEGMENT

    def _start(self, tokens: list[int], chunk: int) -> None:
        """Admit a request as the scheduler does: match, lock, allocate, prefill in chunks of whole segments."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens[:-1]))))
        shared, node = match.device_prefix_len, match.last_device_node
        self.tree.inc_lock_ref(node)
        segments = -(-(len(tokens) - shared) // SEGMENT)
        # A chunk has pages of its own and, for a while, those of the segment that was open before.
        chunks = [(at, min(at + chunk, len(tokens))) for at in range(shared, len(tokens), chunk)]
        beside = self.open.extend_demand(*zip(*chunks, strict=True))
        found = self._allocate(segments + beside)
        if found is None:
            self.tree.dec_lock_ref(node)
            return
        row = self.table.alloc_rows(1)[0]
        pages, beside_pages = found[:segments].tolist(), found[segments:]
        locations = (found[:segments, None] * SEGMENT + torch.arange(SEGMENT)).flatten()
        self.table.req_to_token[row, :shared] = self.tree.path_device_indices(node).to(torch.int32)
        self.table.req_to_token[row, shared : len(tokens)] = locations[: len(tokens) - shared].to(torch.int32)
        for begin, end in chunks:
            count = self.open.extend_demand([begin], [end])
            self.open.extend([row], [begin], [end], beside_pages[:count])
            beside_pages = beside_pages[count:]
            self._extend(row, tokens, begin, end)
        self.running.append(Request(tokens=list(tokens), row=row, node=node, shared=shared, pages=pages))

    def _extend(self, row: int, tokens: list[int], begin: int, end: int) -> None:
        self.store.begin_batch()
        self.store.flush_pending_seals()
        batch = self.operations.describe_extend(self.table.req_to_token, torch.tensor([row]), [begin], [end - begin])
        content = kv(tokens[begin:end], begin)
        for layer in range(LAYOUT.num_layers):
            keys, values = content[:, layer, 0], content[:, layer, 1]
            self.operations.extend(layer, keys[:, :, None], keys, values, batch, keys)

    def _release(self, request: Request, *, keep: bool) -> None:
        """Give back rows and pages; with `keep`, whole segments go to the tree first."""
        self.running.remove(request)
        whole = len(request.tokens) // SEGMENT if keep else request.shared // SEGMENT
        if keep:
            locations = self.table.req_to_token[request.row, : whole * SEGMENT].to(torch.int64, copy=True)
            key = RadixKey(array("q", request.tokens[: whole * SEGMENT]))
            present = self.tree.insert(InsertParams(key=key, value=locations)).prefix_len
            doubles = range(request.shared // SEGMENT, present // SEGMENT)
            self._free([int(locations[index * SEGMENT]) // SEGMENT for index in doubles])
        self._free(request.pages[whole - request.shared // SEGMENT :])
        self.allocator.free_page_ids(self.open.release(request.row))
        self.tree.dec_lock_ref(request.node)
        self.table.free_rows([request.row])

    def _free(self, pages: list[int]) -> None:
        self.allocator.free_page_ids(torch.tensor(pages, dtype=torch.int64))

    @precondition(lambda self: len(self.running) < ROWS - 1)
    @rule(
        stream=st.sampled_from(range(len(STREAMS))),
        length=st.integers(1, SEGMENT * 4 + 5),
        segments_per_chunk=st.integers(1, 3),
    )
    def admit(self, stream: int, length: int, segments_per_chunk: int) -> None:
        self._start(STREAMS[stream][:length].tolist(), segments_per_chunk * SEGMENT)

    @precondition(lambda self: self.retracted and len(self.running) < ROWS - 1)
    @rule()
    def resume(self) -> None:
        self._start(self.retracted.pop(), SEGMENT)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, SEGMENT + 3), seed=st.integers(0, 3))
    def decode(self, steps: int, seed: int) -> None:
        """All running requests, in one batch per step, like the server."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            new = [request for request in self.running if len(request.tokens) % SEGMENT == 0]
            lengths = [len(request.tokens) + 1 for request in self.running]
            found = self._allocate(len(new) + self.open.decode_demand(lengths))
            if found is None or max(lengths, default=0) > self.table.max_context_len:
                if found is not None:
                    self.allocator.free_page_ids(found)
                self.retract(len(self.running) - 1)
                return
            if not self.running:
                return
            for request, page in zip(new, found.tolist(), strict=False):
                request.pages.append(page)
            self.open.decode([request.row for request in self.running], lengths, found[len(new) :])
            for request in self.running:
                place = len(request.tokens) % SEGMENT
                request.tokens.append(int(rng.integers(VOCABULARY)))
                location = request.pages[-1] * SEGMENT + place
                self.table.req_to_token[request.row, len(request.tokens) - 1] = location
            self._decode_step()

    def _decode_step(self) -> None:
        self.store.begin_batch()
        self.store.flush_pending_seals()
        rows = torch.tensor([request.row for request in self.running])
        lengths = torch.tensor([len(request.tokens) for request in self.running])
        batch = self.operations.describe_decode(self.table.req_to_token, rows, lengths, lengths)
        commit(self.store, self.table.req_to_token, rows, lengths.tolist())
        content = torch.cat([kv(r.tokens[-1:], len(r.tokens) - 1) for r in self.running])
        for layer in range(LAYOUT.num_layers):
            keys, values = content[:, layer, 0], content[:, layer, 1]
            self.operations.decode(layer, keys[:, :, None], keys, values, batch, keys)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def finish(self, which: int) -> None:
        self._release(self.running[which % len(self.running)], keep=True)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def abort(self, which: int) -> None:
        self._release(self.running[which % len(self.running)], keep=False)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def retract(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        if len(request.tokens) < SEGMENT * 6:
            self.retracted.append(list(request.tokens))
        self._release(request, keep=False)

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        self.tree.evict(EvictParams(num_tokens=pages * SEGMENT))

    def _tree_segments(self) -> list[tuple[int, list[int]]]:
        """(slot, all tokens up to the segment's end) of every segment in the tree."""
        found = []

        def visit(node: TreeNode, before: list[int]) -> None:
            tokens = before + list(node.key.raw_token_ids()) if node is not self.tree.root_node else before
            if node is not self.tree.root_node:
                for place in range(0, len(node.value), SEGMENT):
                    end = len(before) + place + SEGMENT
                    found.append((int(node.value[place]) // SEGMENT, tokens[:end]))
            for child in node.children.values():
                visit(child, tokens)

        visit(self.tree.root_node, [])
        return found

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        free = self.allocator.get_all_free_pages().tolist()
        in_tree = [slot for slot, _ in self._tree_segments()]
        owned = [page for request in self.running for page in request.pages]
        table = self.store.tails.table
        beside = [page for row, count in self.open._held.items() for page in table[row, NOW, :count].tolist()]
        leaving = [page for _, pages in self.open._retired for page in pages.tolist()]
        assert sorted(free + in_tree + owned + beside + leaving) == list(range(1, SLOTS))
        assert len(beside) + len(leaving) == self.open.in_use + self.open.returning
        assert self.open.held == sum(self.open.pages.extra(len(request.tokens) % SEGMENT) for request in self.running)

    @invariant()
    def live_slabs_hold_what_the_oracle_says(self) -> None:
        pending = {slot for seals in self.store._pending for slot in seals.slots.tolist()}
        live = self._tree_segments()
        for request in self.running:
            for number, page in enumerate(request.pages):
                end = request.shared + (number + 1) * SEGMENT
                if end <= len(request.tokens):
                    live.append((page, request.tokens[:end]))
        for slot, tokens in live:
            if slot not in pending:
                expected = expected_slab(tokens, len(tokens) // SEGMENT - 1)
                np.testing.assert_array_equal(self.store.slabs[slot].numpy(), expected)

    @invariant()
    def tails_hold_the_open_segments(self) -> None:
        for request in self.running:
            begin = len(request.tokens) // SEGMENT * SEGMENT
            expected = kv(request.tokens[begin:], begin).permute(1, 2, 3, 0, 4)
            if begin < len(request.tokens):
                tails, own = self.store.tails, torch.tensor([request.pages[-1]])
                pages = tails.pages(torch.tensor([request.row]), own, NOW)
                found = [tails.read(layer, pages, expected.shape[3])[0] for layer in range(LAYOUT.num_layers)]
                np.testing.assert_array_equal(torch.stack(found).numpy(), expected.numpy())

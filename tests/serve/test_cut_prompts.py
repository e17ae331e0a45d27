"""How SGLang's own admission goes on with a prompt that it has cut, on our allocator and cache, in scarce memory."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.open_machine import PAGES, SEGMENT, STREAMS, OpenMachine
from tests.serve.test_open_property import flags  # noqa: F401

CHUNK = 6 * SEGMENT


@pytest.fixture(autouse=True)
def admission(monkeypatch):
    """What admission asks of the server's flags, which is not running."""
    features, mamba = (
        SimpleNamespace(**{name: False}) for name in ("enable_encoder_swa_bounded_replay", "enable_mamba_extra_buffer")
    )
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: SimpleNamespace(features=features, mamba=mamba))


def request(name: str, tokens: int) -> Req:
    """A request whose prompt begins like those of the machine's first stream."""
    return Req(name, "", array("q", (list(STREAMS[0]) * 4)[:tokens]), SamplingParams(max_new_tokens=8))


class Prefill:
    """A prompt of which one chunk has been computed, on a pool of which only `free` pages are left."""

    def __init__(self, free: int) -> None:
        self.life = OpenMachine()
        self.req = request("cut", 12 * SEGMENT - 5)
        adder = self.adder(0)
        self.req.init_next_round_input(self.life.tree)
        adder.add_one_req(self.req, has_chunked_req=False, truncation_align_size=None)
        assert adder.new_chunked_req is self.req
        self.life._extend([self.req], [self.req.extend_end])
        self.life.allocator.cut = self.req
        checkpoint_kv_cache(self.req, self.life.tree)
        self.life._describe()
        # Other requests hold the rest.
        assert self.life.allocator.alloc(self.life.allocator.available_size() - free * SEGMENT) is not None

    def adder(self, wanted: int) -> PrefillAdder:
        """wanted: tokens that running requests may still come to need, by SGLang's estimate."""
        allocator = self.life.allocator
        adder = PrefillAdder(SEGMENT, self.life.tree, allocator, None, 0.5, PAGES * SEGMENT, CHUNK)
        adder.memory_budget.total_offset += wanted
        return adder

    def go_on(self, wanted: int) -> PrefillAdder:
        adder = self.adder(wanted)
        self.req.init_next_round_input()
        adder.add_chunked_req(self.req)
        return adder


def needed() -> int:
    """Pages of the last chunk: six slabs' and those of the open segment in which it ends."""
    return Prefill(20).life.allocator.next_chunk_pages(CHUNK - 5)


def test_an_estimate_of_what_others_need_leaves_no_cut_prompt_out():
    state = Prefill(needed())
    adder = state.go_on(wanted=PAGES * SEGMENT)
    assert adder.can_run_list == [state.req]
    assert state.req.extend_end == 12 * SEGMENT - 5
    state.life._extend([state.req], [state.req.extend_end])


def test_nobody_is_admitted_before_a_cut_prompt_that_finds_no_room():
    """SGLang would count a chunk for it that no batch holds, and throw the first token of its answer away."""
    state = Prefill(needed() - 1)
    adder = state.go_on(wanted=0)
    assert adder.can_run_list == []
    # It would find room by itself.
    assert 3 + 8 + SEGMENT + state.life.allocator.open_reserve() < adder.memory_budget.remaining_total
    other = request("other", 3)
    other.init_next_round_input(state.life.tree)
    assert adder.add_one_req(other, has_chunked_req=True, truncation_align_size=None) is AddReqResult.NO_TOKEN
    assert adder.can_run_list == []


def test_a_cut_prompt_pays_for_its_open_segment():
    state = Prefill(20)
    adder = state.go_on(wanted=0)
    allocator = state.life.allocator
    new, page = CHUNK, SEGMENT
    assert adder.memory_budget.current_offset == new + page + allocator.open_reserve()
    assert allocator.request_slot_reserve(has_req_pool_slot=True) == 0


def test_misses_by_order_leave_nothing_protected(monkeypatch):
    """SGLANG_RADIX_FORCE_MISS calls a hit off; what it said of its last tokens must not stay."""
    life = OpenMachine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    life.finish(which=0)
    req = request("again", SEGMENT + 40)
    req.init_next_round_input(life.tree)
    assert (req.prefix_len, req.kv.cache_protected_len) == (SEGMENT + 30, SEGMENT)
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "1")
    req.init_next_round_input(life.tree)
    assert (req.prefix_len, req.kv.cache_protected_len) == (0, 0)


@pytest.mark.parametrize("salt", ["", None])
def test_an_empty_salt_is_none(salt):
    life = OpenMachine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    life.finish(which=0)
    req = Req("salted", "", request("", SEGMENT + 40).origin_input_ids, SamplingParams(), cache_salt=salt)
    req.init_next_round_input(life.tree)
    assert req.prefix_len == SEGMENT + 30


def test_freed_pages_are_told():
    """The reservoir of retrieval forgets them."""
    life, told = OpenMachine(), []
    life.allocator.get_kvcache().on_free.append(told.append)
    tokens = life.allocator.alloc(3 * SEGMENT)
    life.allocator.free(tokens)
    assert sorted(torch.cat(told).tolist()) == sorted(set((tokens // SEGMENT).tolist()))

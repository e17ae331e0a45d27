"""Random lives of requests with drafts; what is checked after each step is in `chain_machine.py`."""

from __future__ import annotations

import functools
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import eagle_utils

from sgl_ragged.features.drafts import torch_verify
from sgl_ragged.features.drafts.chain_hooks import alloc_for_chains
from tests.chain_machine import WIDTH, ChainMachine, OverlappedMachine
from tests.examples import examples
from tests.open_machine import PAGES, SCORER, SEGMENT
from tests.pool_machine import expected_slab
from tests.serve.test_open_property import SERVING


@pytest.fixture(autouse=True, scope="module")
def flags():
    """What SGLang's functions ask of the server, which is not running; and what it has for GPUs alone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm="NGRAM"))
    patch.setattr(common, "get_serving", lambda: SERVING)
    patch.setattr("sglang.srt.managers.schedule_batch.get_serving", common.get_serving)
    patch.setattr(allocation, "attention_backends", lambda: ("torch_native", "torch_native"))
    patch.setattr(allocation, "assign_req_to_token_pool_func", torch_verify.write_locations)
    patch.setattr(eagle_utils, "get_alloc_reserve_per_decode", lambda: 2 * WIDTH)
    patch.setattr(eagle_utils, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=1))
    hooked = functools.partial(alloc_for_chains, allocation.alloc_for_spec_decode)
    patch.setattr(eagle_utils, "alloc_for_spec_decode", hooked)
    yield
    patch.undo()


ChainMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestLives = ChainMachine.TestCase

OverlappedMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestOverlappedLives = OverlappedMachine.TestCase


@pytest.mark.parametrize("machine", [ChainMachine, OverlappedMachine])
@pytest.mark.parametrize("width", [WIDTH, SEGMENT])
def test_who_is_alone_never_lacks_a_page(width, machine, monkeypatch):
    """As long as SGLang lets it become, whatever is accepted: nobody is there to be retracted."""
    monkeypatch.setattr(eagle_utils, "get_alloc_reserve_per_decode", lambda: 2 * width)
    life = machine()
    life._use(width)
    life.allocator.get_kvcache().views = None
    room = 14 * SEGMENT
    assert life.allocator.alloc(PAGES * SEGMENT - room) is not None
    prompt = 3 * SEGMENT - 5
    more = life.allocator.max_new_tokens_for_memory(
        prompt, 10**6, token_capacity=room, sliding_window_size=None, chunk_size=None
    )
    longest = prompt + more
    assert longest > 3 * SEGMENT
    life.admit(streams=[0], length=prompt, chunk=SEGMENT)
    request = life.running[0]
    while request.kv.kv_committed_len < longest - 1:
        assert life._has_room()
        life._decode_step()
    life.slabs_hold_what_the_oracle_says()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("machine", [ChainMachine, OverlappedMachine])
def test_a_request_ends_with_its_segment(machine, late):
    """Its slab is cached, whether or not a chain has begun behind it."""
    life = machine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    request = life.running[0]
    while request.kv.kv_committed_len + len(life.flight.get(request.rid, ())) < 2 * SEGMENT:
        life.decode(steps=1, seed=0)
        life.every_page_is_in_one_place()
    life.open_segments_hold_their_tokens()
    life.slabs_hold_what_the_oracle_says()
    life.finish(which=0, late=late)
    life.every_page_is_in_one_place()
    slots = [int(location) // SEGMENT for location in life.tree.all_values_flatten()[::SEGMENT]]
    assert len(slots) == 2
    life._describe()
    for number, slot in enumerate(slots):
        np.testing.assert_array_equal(
            life.store.slabs[slot].numpy(), expected_slab(life.tokens(request), number, SCORER)
        )


@pytest.mark.parametrize("machine", [ChainMachine, OverlappedMachine])
@pytest.mark.parametrize("back", [0, 1, 3])
def test_what_a_request_leaves_within_its_last_chain_is_found(machine, back):
    """Nobody has begun behind the chain, so its segment is sealed only if all of its tokens count."""
    life = machine()
    life.admit(streams=[0], length=2 * SEGMENT - 2 * WIDTH, chunk=SEGMENT)
    request = life.running[0]
    life.accepting = SimpleNamespace(integers=lambda low, high=None, *size: np.full(size or (), (high or low) - 1))
    while request.kv.kv_committed_len + len(life.flight.get(request.rid, ())) < 2 * SEGMENT:
        life._decode_step()
    if machine is ChainMachine:
        life.finish(which=0, back=back)
    else:
        life.finish(which=0, back=back, late=False)
    following = Req("next", "", array("q", life.tokens(request)), SamplingParams())
    match_kv_cache(following, life.tree)
    # The last token of an answer has been sampled, not computed.
    assert following.prefix_len == min(2 * SEGMENT, 2 * SEGMENT + 1 - back)


def test_a_prompt_that_ends_at_a_border_is_kept_before_its_segment_is_sealed():
    life = OverlappedMachine()
    life.admit(streams=[0], length=2 * SEGMENT - 2, chunk=SEGMENT)
    life.decode(steps=WIDTH, seed=0)
    (entry,) = life._entries()
    assert len(entry.tokens) == SEGMENT - 2
    assert not life.promised
    life.open_segments_hold_their_tokens()


def test_what_a_grammar_takes_back_of_a_sealed_segment_is_not_kept():
    life = OverlappedMachine()
    life.admit(streams=[0], length=2 * SEGMENT - 2 * WIDTH, chunk=SEGMENT)
    request = life.running[0]
    life.accepting = SimpleNamespace(integers=lambda low, high=None, *size: np.full(size or (), (high or low) - 1))
    while request.kv.kv_committed_len + len(life.flight.get(request.rid, ())) < 2 * SEGMENT:
        life._decode_step()
    life.finish(which=0, late=True, cut=3)
    life._describe()
    assert max(len(entry.tokens) for entry in life._entries()) == SEGMENT - 2 * WIDTH
    life.open_segments_hold_their_tokens()

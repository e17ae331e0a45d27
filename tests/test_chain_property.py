"""Random lives of requests with drafts; what is checked after each step is in `chain_machine.py`."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache import allocation, common
from sglang.srt.speculative import eagle_utils

from sgl_ragged.drafts import torch_verify
from sgl_ragged.drafts.sglang_chains import alloc_for_chains
from tests.chain_machine import WIDTH, ChainMachine
from tests.examples import examples
from tests.open_machine import OPTIONS, SEGMENT
from tests.test_open_property import SERVING


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
    hooked = functools.partial(alloc_for_chains, OPTIONS, allocation.alloc_for_spec_decode)
    patch.setattr(eagle_utils, "alloc_for_spec_decode", hooked)
    yield
    patch.undo()


ChainMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestLives = ChainMachine.TestCase


def test_a_chain_ends_a_segment():
    life = ChainMachine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    while life.running[0].kv.kv_committed_len < 2 * SEGMENT:
        life.decode(steps=1, seed=0)
        life.every_page_is_in_one_place()
    assert life.store.has_pending
    life.decode(steps=SEGMENT, seed=0)
    life.open_segments_hold_their_tokens()
    life.slabs_hold_what_the_oracle_says()
    life.finish(which=0)
    life.every_page_is_in_one_place()

"""Random lives of requests whose open segments are cache; what is checked after each step is in `open_machine.py`."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ragged.serve.radix_cache import _HIT
from tests.examples import examples
from tests.open_machine import HOST_PAGES, SEGMENT, STREAMS, OpenMachine

SERVING = SimpleNamespace(strip_thinking_cache=False)


@pytest.fixture(autouse=True, scope="module")
def flags():
    """What SGLang's functions ask of the server's flags, which is not running."""
    patch = pytest.MonkeyPatch()
    patch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    patch.setattr(common, "get_serving", lambda: SERVING)
    patch.setattr("sglang.srt.managers.schedule_batch.get_serving", common.get_serving)
    patch.setattr(allocation, "attention_backends", lambda: ("torch_native", "torch_native"))
    yield
    patch.undo()


OpenMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestLives = OpenMachine.TestCase


def test_two_turns_find_one_open_segment_and_leave_it():
    life = OpenMachine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    life.go_on(which=0, twice=True, more=20, finished=True)
    assert life.found == 2 * 30
    life.every_page_is_in_one_place()
    life.decode(steps=SEGMENT, seed=0)
    life.open_segments_hold_their_tokens()
    life.slabs_hold_what_the_oracle_says()


def test_an_entry_comes_back_from_the_host():
    life = OpenMachine()
    life.admit(streams=[0], length=SEGMENT + 30, chunk=SEGMENT)
    life.finish(which=0)
    life.evict(pages=1)
    assert not life.tree.entries.num_pages
    assert life.host.pages_in_use
    life.admit(streams=[0], length=SEGMENT + 40, chunk=SEGMENT)
    assert life.found == 30
    life.open_segments_hold_their_tokens()
    life.the_host_holds_what_it_took()


def test_the_host_keeps_those_that_were_used_last():
    life = OpenMachine()
    for sealed in (1, 2, 3):
        life.admit(streams=[0], length=sealed * SEGMENT + 40, chunk=SEGMENT)
        life.finish(which=0)
        life.evict(pages=1)
        life.the_host_holds_what_it_took()
    pages = life.open.pages.pages(40)
    assert life.host.pages_in_use == HOST_PAGES // pages * pages < 3 * pages
    life.found = 0
    life.admit(streams=[0], length=SEGMENT + 45, chunk=SEGMENT)
    assert life.found == 0
    life.admit(streams=[0], length=3 * SEGMENT + 45, chunk=SEGMENT)
    assert life.found == 40


def test_what_was_found_on_the_host_stays_until_it_is_copied():
    life = OpenMachine()
    for sealed in (1, 2, 3, 4):
        life.admit(streams=[0], length=sealed * SEGMENT + 40, chunk=SEGMENT)
        life.finish(which=0)
        if sealed < 3:
            life.evict(pages=1)
    req = Req("late", "", array("q", STREAMS[0][: SEGMENT + 45].tolist()), SamplingParams(max_new_tokens=900))
    req.refresh_fill_ids()
    life.allocator.create_prefill_budget(life.tree)
    match_kv_cache(req, life.tree, req.origin_input_ids, max_prefix_len=SEGMENT + 44)
    assert req.prefix_len == SEGMENT + 40
    for _ in range(2):
        life.evict(pages=1)
    hit = getattr(req, _HIT)
    assert hit.below
    assert life.host.find(SEGMENT, (None, None), req.origin_input_ids, SEGMENT + 44) == (hit.entry, 40)

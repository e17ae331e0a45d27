"""Random lives of requests with bounded histories; what is checked after each step is in `tests/bounded_machine.py`."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.mem_cache import common

from sgl_ragged.features.history.admission import check_held_pages
from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.serve.pool import slab_allocator
from tests.bounded_machine import LIMIT, SEGMENT, SERVING, BoundedMachine
from tests.examples import examples
from tests.windowed_machine import LongWindows, WindowedMachine


@pytest.fixture(autouse=True, scope="module")
def flags():
    """What releasing a request asks of the server's flags, which is not running."""
    patch = pytest.MonkeyPatch()
    patch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    patch.setattr(common, "get_serving", lambda: SERVING)
    patch.setattr("sglang.srt.managers.schedule_batch.get_serving", common.get_serving)
    yield
    patch.undo()


class ByAge(BoundedMachine):
    bound = HistoryBound(LIMIT, "recency")


BoundedMachine.TestCase.settings = examples(160, stateful_step_count=25)
ByAge.TestCase.settings = examples(20, stateful_step_count=25)
TestByScore = BoundedMachine.TestCase
WindowedMachine.TestCase.settings = examples(100, stateful_step_count=25)
LongWindows.TestCase.settings = examples(40, stateful_step_count=25)
TestByAge = ByAge.TestCase
TestWindows = WindowedMachine.TestCase
TestLongWindows = LongWindows.TestCase


@pytest.mark.parametrize("machine", [BoundedMachine, LongWindows])
@pytest.mark.parametrize("length", [3, 5])
def test_the_tree_keeps_thoughts_that_a_retracted_request_was_prefilled_with(machine, length):
    """Stripped of its thoughts, it owns less than the tree has taken of it."""
    life = machine()
    life.admit(stream=0, length=length, chunk=8)
    life.decode(steps=9, seed=0)
    life.retract(which=0)
    life.resume(chunk=8)
    taken = life.running[0].kv.cache_protected_len
    assert taken > length
    life.finish(which=0, stripped=True)
    life.every_page_is_in_one_place()
    assert len(life.tree.all_values_flatten()) == taken


def test_pages_that_were_given_back_may_be_free(monkeypatch):
    """And no other page that a request's row names: SGLang's check of it finds one that is freed behind its back."""
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
    life = BoundedMachine()
    life.admit(stream=0, length=16 * SEGMENT, chunk=8)
    life.decode(steps=2, seed=0)
    kv = life.running[0].kv
    assert len(life.histories.get(kv.req_pool_idx).returned) > 1
    checker = SchedulerInvariantChecker(
        **dict.fromkeys(field.name for field in fields(SchedulerInvariantChecker))
        | {"tree_cache": life.tree, "token_to_kv_pool_allocator": life.allocator, "req_to_token_pool": life.table}
        | {"get_last_batch": lambda: None, "get_running_batch": lambda: SimpleNamespace(reqs=life.running)}
        | {"get_chunked_req": lambda: None}
    )

    def check() -> None:
        check_held_pages(SchedulerInvariantChecker._check_kv_page_invariants, checker)

    with pytest.raises(ValueError, match="use-after-free"):
        checker._check_kv_page_invariants()
    check()
    assert checker.req_to_token_pool is life.table
    last = life.table.req_to_token[kv.req_pool_idx, kv.kv_allocated_len - 1 : kv.kv_allocated_len]
    slab_allocator(life.allocator).free(last.long() // SEGMENT * SEGMENT + torch.arange(SEGMENT))
    with pytest.raises(ValueError, match="use-after-free"):
        check()

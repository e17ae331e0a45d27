"""Random lives of requests whose open segments are cache; what is checked after each step is in `open_machine.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache import allocation, common

from tests.examples import examples
from tests.open_machine import SEGMENT, OpenMachine

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

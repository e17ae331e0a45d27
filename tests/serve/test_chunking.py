"""Batches of prefill as SGLang's own scheduler puts them together, from its own requests, allocator and cache."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ragged.serve.prefill_budget import SlabBudget

SEGMENT, CHUNK, TOKENS, PROMPT = 32, 96, 4096, 300


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    """What admission asks of the server's flags, which is not running."""
    features, mamba = (
        SimpleNamespace(**{name: False}) for name in ("enable_encoder_swa_bounded_replay", "enable_mamba_extra_buffer")
    )
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: SimpleNamespace(features=features, mamba=mamba))


class WithOurBudget(PagedTokenToKVPoolAllocator):
    def create_prefill_budget(self, tree_cache, **more):
        return SlabBudget(self, tree_cache, **more)


def cut(allocator_class: type, ignore_eos: list[bool], *, decoding: int) -> list[int]:
    """Lengths of first chunks of waiting requests, in their order, for those in the next batch that it cuts.

    ignore_eos: of each of them. decoding: requests that decode within the batch.
    """
    allocator = allocator_class(TOKENS, SEGMENT, torch.float32, "cpu", None, need_sort=False)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=True,
            req_to_token_pool=ReqToTokenPool(4, TOKENS, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=SEGMENT,
            tree_components=(ComponentType.FULL,),
        )
    )
    adder = PrefillAdder(SEGMENT, cache, allocator, None, 0.5, TOKENS, CHUNK, num_mixed_decode_tokens=decoding)
    for number, ignores in enumerate(ignore_eos):
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=ignores)
        req = Req(f"request {number}", "", array("q", range(PROMPT)), sampling)
        req.init_next_round_input(cache)
        if adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None) != AddReqResult.CONTINUE:
            break
    assert adder.can_run_list, "the chunk has room for one"
    return [req.extend_end for req in adder.can_run_list if req.extend_end < PROMPT]


def test_sglang_alone_cuts_two_and_goes_on_with_one():
    """Where it does not any more, the rule can go."""
    assert cut(PagedTokenToKVPoolAllocator, [False, True], decoding=4) == [64, 28]


@pytest.mark.parametrize("decoding", [0, 1, 4, 31, 33])
@pytest.mark.parametrize(
    "ignore_eos", [[False, True], [True, False], [True, True], [False, False], [False, True, True]]
)
def test_a_batch_cuts_one_request(ignore_eos, decoding):
    room = CHUNK - decoding
    assert cut(WithOurBudget, ignore_eos, decoding=decoding) == [room if ignore_eos[0] else room // SEGMENT * SEGMENT]

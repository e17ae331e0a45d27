"""Scripts for SGLang's scripted runtime. They run inside the scheduler, one of its steps between two yields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.test.scripted_runtime_chunked_helpers import (
    advance_to_decode_step,
    advance_to_lifecycle_stage,
    run_until_all_finished,
    run_until_finished,
)

NEW = 12
"""Tokens that the answers of most scripts have."""


def free_tokens(t: Any) -> int:
    return t.scheduler.token_to_kv_pool_allocator.available_size()


def settle(t: Any) -> Iterator[None]:
    """Wait until nothing runs, then empty the cache."""
    for _ in range(40):
        if t.is_fully_idle:
            break
        yield
    assert t.is_fully_idle
    t.flush_cache()
    for _ in range(5):
        yield


def abort_at(t: Any, stage: str, prompt_len: int) -> Iterator[None]:
    """Abort a request at a stage of its life; all of its pages and its row come back."""
    yield from settle(t)
    tokens, rows = free_tokens(t), t.engine_stats()["req_pool_free"]
    request = t.start_req(prompt_len=prompt_len, max_new_tokens=NEW, ignore_eos=True, prompt_token=7)
    chunks = prompt_len // t.scheduler.chunked_prefill_size
    yield from advance_to_lifecycle_stage(request, stage, num_middle_chunks=chunks, max_new_tokens=NEW)
    assert free_tokens(t) < tokens, "the request holds nothing at this stage"
    t.abort(request)
    yield from run_until_finished(request)
    yield from settle(t)
    assert (free_tokens(t), t.engine_stats()["req_pool_free"]) == (tokens, rows)


def retract(t: Any, lengths: list[int]) -> Iterator[None]:
    """Retract requests while they decode; they finish later, and all pages come back."""
    yield from settle(t)
    tokens = free_tokens(t)
    requests = [
        t.start_req(prompt_len=length, max_new_tokens=40, ignore_eos=True, prompt_token=11 + number)
        for number, length in enumerate(lengths)
    ]
    for request in requests:
        yield from advance_to_decode_step(request, 4)
    t.pause_generation(mode="retract")
    for _ in range(4):
        yield
    assert not t.scheduler.running_batch.reqs
    t.continue_generation()
    yield from run_until_all_finished(requests)
    yield from settle(t)
    assert free_tokens(t) == tokens


def least_pages(t: Any, prompt_len: int, new: int) -> int:
    """Free pages that SGLang wants for a request: its tokens, a page, and the most that its open segment can take."""
    open_segments = getattr(t.scheduler.token_to_kv_pool_allocator, "open_segments", None)
    reserve = open_segments.pages.transient if open_segments is not None else 0
    return (prompt_len + new) // t.scheduler.page_size + 1 + reserve + 1


def little_memory(t: Any, missing: int, prompt_len: int, new: int) -> Iterator[None]:
    """Send four requests while the pages for one are free, but for `missing`: one runs after the other, or none."""
    yield from settle(t)
    tokens, pages = free_tokens(t), least_pages(t, prompt_len, new) - missing
    t.exhaust_kv(leave_pages=pages)
    assert free_tokens(t) == pages * t.scheduler.page_size
    requests = [
        t.start_req(prompt_len=prompt_len, max_new_tokens=new, ignore_eos=True, prompt_token=21 + number)
        for number in range(4)
    ]
    if missing:
        for _ in range(50):
            yield
        assert not any(request.finished or request.chunks_done for request in requests)
        t._release_exhausted_pools()
    yield from run_until_all_finished(requests, max_steps=4000)
    t._release_exhausted_pools()
    yield from settle(t)
    assert free_tokens(t) == tokens

"""The decode server: pages for arriving requests, and refusal of prefill servers with another plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import prepare_abort

from sgl_ragged.features.disaggregation.prefill_server import exchange_of, flush_seals
from sgl_ragged.features.disaggregation.roles import disagreement
from sgl_ragged.serve.pool import slab_allocator

logger = logging.getLogger(__name__)


def allocate(
    original: Callable,
    queue: Any,
    req: Any,
    prefix_indices: Any = None,
    prefix_len: int | None = None,
    total_prefix_len: int | None = None,
) -> Any:
    """Give the open segment of a request its pages, once it has a row and pages for its segments."""
    found = original(queue, req, prefix_indices, prefix_len, total_prefix_len)
    allocator, kv = slab_allocator(queue.token_to_kv_pool_allocator), req.kv
    begins = total_prefix_len or prefix_len or 0
    allocator.open_segments.extend([kv.req_pool_idx], [begins], [kv.kv_committed_len], allocator.take_open_pages())
    return found


def needed_tokens(original: Callable, queue: Any, *, fill_len: int, prefix_len: int) -> int:
    """Return the tokens that SGLang needs before it allocates, extra pages of the open segment included."""
    allocator = slab_allocator(queue.token_to_kv_pool_allocator)
    open_pages = allocator.open_segments.extend_demand([prefix_len], [fill_len])
    return original(queue, fill_len=fill_len, prefix_len=prefix_len) + open_pages * allocator.page_size


def needed_again(original: Callable, queue: Any, req: Any) -> tuple[int, int]:
    """Return the tokens that a retracted request needs, extra pages of its open segment included."""
    full, windows = original(queue, req)
    allocator = slab_allocator(queue.token_to_kv_pool_allocator)
    open_pages = allocator.open_segments.extend_demand([0], [queue._pre_alloc_fill_len(req)])
    return full + open_pages * allocator.page_size, windows


def refuse_what_never_fits(original: Callable, queue: Any, req: Any) -> bool:
    """Refuse a request that needs more pages than exist; SGLang compares tokens, and would never admit it."""
    if original(queue, req):
        return True
    needed, most = queue._prealloc_required_tokens(req)[0], queue.max_total_num_tokens
    if needed <= most:
        return False
    message = f"Request {req.rid} needs pages of {needed} tokens on the decode server, which has {most}"
    logger.error("%s", message)
    prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
    return True


def destinations(original: Callable, queue: Any, decode_req: Any, kv_indices: Any, page_size: int) -> np.ndarray:
    """Return the pages that the prefill server writes to: those of segments, then extra pages of the open segment."""
    found, kv = original(queue, decode_req, kv_indices, page_size), decode_req.req.kv
    pages = exchange_of(queue.token_to_kv_pool).pages
    # A pending seal of the pages' former request may still write to them.
    flush_seals(pages, queue.scheduler)
    extra = pages.extra(kv.req_pool_idx, kv.kv_committed_len)
    return np.concatenate([found, extra.cpu().numpy().astype(found.dtype)])


def agree_first(
    original: Callable, queue: Any, requests: dict[str, list[Any]]
) -> tuple[dict[str, list[Any]], list[Any]]:
    """End requests whose prefill server has another plan, with one line each; the other requests go on.

    SGLang raises where page sizes or dtypes differ, which would end this server because of the prefill server's flags.
    """
    ready: dict[str, list[Any]] = {}
    waiting: list[Any] = []
    manager = queue.kv_manager
    own = exchange_of(queue.token_to_kv_pool).agreement
    for address, waiters in requests.items():
        reason = None
        try:
            found, rest = original(queue, {address: waiters})
        except RuntimeError as error:
            found, rest, reason = {}, [], str(error)
        waiting += rest
        if found:
            info = manager.prefill_info_table[address]
            reason = disagreement(own, info.kv_layout, manager.attn_tp_size, info.attn_tp_size)
        if reason is None:
            ready |= found
            continue
        manager.prefill_info_table.pop(address, None)
        for room in (one.kv_receiver.bootstrap_room for one in waiters if one.kv_receiver is not None):
            manager.record_failure(room, f"sgl_ragged: {reason} ({address})")
            manager.update_status(room, KVPoll.Failed)
    return ready, waiting

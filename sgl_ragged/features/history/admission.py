"""Reservations, counts and leak checks in SGLang's scheduler for requests with bounded histories."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sgl_ragged.features.history.histories import Histories
    from sgl_ragged.features.history.radix_cache import BoundedRadixCache


def growth(cache: BoundedRadixCache, req: Any, extend: int) -> int:
    """Return the tokens that a request can still come to hold, `extend` of them in prefill (`HistoryBound.growth`)."""
    size = cache.page_size
    shared = req.kv.cache_protected_len if req.kv.holds_kv else req.prefix_len
    new = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    return cache.histories.bound.growth(shared // size, cache.own_segments(req.kv), max(extend, 0), new, size)


def make_room(original: Callable, batch: Any, selected_indices: list[int] | None = None) -> Any:
    """Give back pages of segments that leave their views, before SGLang checks whether a decode step fits."""
    for req in batch.reqs:
        batch.tree_cache.open_segment(req)
    return original(batch, selected_indices)


def reserve_running(original: Callable, adder: Any, req: Any) -> float:
    """Return the tokens that a running request may still need: SGLang's estimate, or the bound's if it is less."""
    return min(original(adder, req), growth(adder.tree_cache, req, 0))


def fits(original: Callable, adder: Any, req: Any, *, total_tokens: int, **more: Any) -> Any:
    """Return SGLang's admission result for a waiting request, with the tokens that its bound allows."""
    extend = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
    overhead = adder.per_req_token_overhead + adder._request_slot_reserve_for_req(req)
    most = req.host_hit_length + growth(adder.tree_cache, req, extend) + overhead
    return original(adder, req, total_tokens=min(total_tokens, most), **more)


def reserve_admitted(
    original: Callable,
    adder: Any,
    prefix_len: int,
    extend_input_len: int,
    max_new_tokens: int,
    *args: Any,
    **more: Any,
) -> None:
    """Reserve tokens for the request that was admitted last: its chunk, and the growth that its bound allows."""
    req = adder.can_run_list[-1]
    rest = len(req.full_untruncated_fill_ids) - req.extend_end
    beyond = max(growth(adder.tree_cache, req, extend_input_len + rest) - extend_input_len, 0)
    # SGLang reserves nothing beyond the chunk for an unfinished prompt, because it checked the whole prompt before.
    original(adder, prefix_len, extend_input_len, beyond if rest else min(max_new_tokens, beyond), *args, **more)
    adder.memory_budget.cut = rest > 0


class _HeldPages:
    """SGLang's request table for its checks: pages that a request has freed read as page 0.

    The table itself still names those pages, because a batch that has not run yet may read them; they may belong to
    another request.
    """

    def __init__(self, table: torch.Tensor, histories: Histories, segment: int) -> None:
        self.shape, self.device = table.shape, table.device
        self._table, self._histories, self._segment = table, histories, segment

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        found = self._table[rows].clone()
        for line, row in zip(found, rows.tolist(), strict=True):
            history = self._histories.get(row)
            for number in history.returned if history is not None else ():
                line[number * self._segment : (number + 1) * self._segment] = 0
        return found


def check_held_pages(original: Callable, checker: Any) -> None:
    """Check that no page of a request is free, for the pages that requests still hold."""
    table, cache = checker.req_to_token_pool, checker.tree_cache
    held = _HeldPages(table.req_to_token, cache.histories, cache.page_size)
    checker.req_to_token_pool = SimpleNamespace(req_to_token=held)
    try:
        original(checker)
    finally:
        checker.req_to_token_pool = table

"""Hooks around SGLang's drafts: chains instead of trees, pages for them, the border, and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sgl_ragged.attention.operations import commit
from sgl_ragged.drafts.chains import as_chains, end_at_border
from sgl_ragged.plugin.allocator import begin_batch
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.plugin.pool import RaggedTokenToKVPool
from sgl_ragged.windows.sglang_pool import slab_allocator, slab_pool


class Chains:
    """What is accepted of drafts, in a worker. req_to_token: SGLang's request table."""

    def __init__(self, pool: RaggedTokenToKVPool, req_to_token: torch.Tensor) -> None:
        self._pool, self._req_to_token = pool, req_to_token

    def commit(self, rows: torch.Tensor, rows_cpu: Sequence[int], lengths: Sequence[int]) -> None:
        """Requests have `lengths` tokens that count. rows: integers [requests], of SGLang's table, on the device."""
        commit(self._pool.store, self._req_to_token, rows, lengths)
        self._pool.open_segments.commit(rows_cpu, lengths)


def draft_chains(
    options: RaggedOptions,
    original: Callable,
    corpus: Any,
    req_ids: list[str],
    batch_tokens: list[list[int]],
    total_lens: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Of each tree that the corpus finds, its longest path. Even with breadth 1 it has one for each suffix it knows."""
    tokens, mask = original(corpus, req_ids, batch_tokens, total_lens)
    return as_chains(tokens, mask, corpus.draft_token_num)


def alloc_for_chains(
    options: RaggedOptions, original: Callable, tree_cache: Any, req_to_token_pool: Any, *, reqs: Any, **more: Any
) -> None:
    """Gives open segments their pages for the next chain; SGLang's own, for two chains ahead, are for slabs."""
    allocator = slab_allocator(tree_cache.token_to_kv_pool_allocator)
    rows, lengths = [req.kv.req_pool_idx for req in reqs], [req.kv.kv_committed_len for req in reqs]
    begin_batch(tree_cache)
    with allocator.ahead():
        original(tree_cache, req_to_token_pool, reqs=reqs, **more)
    demand = allocator.open_segments.chain_demand(rows, lengths)
    pages = allocator.take_pages(tree_cache, demand)
    if pages is None:
        raise RuntimeError(f"no room for {demand} pages of open segments: {tree_cache.available_and_evictable_str()}")
    allocator.open_segments.chain(rows, lengths, pages)


def sample_to_border(
    options: RaggedOptions, original: Callable, verify_input: Any, batch: Any, *args: Any, **more: Any
) -> Any:
    """Has chains end at borders, and says what was accepted of them.

    Without overlapped batches the scheduler waits for what was accepted right after this; so does this.
    """
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, *args, **more)
    pool = slab_pool(batch.token_to_kv_pool_allocator.get_kvcache())
    end_at_border(verify_input.retrieve_next_token, batch.seq_lens, pool.page_size)
    found = original(verify_input, batch, *args, **more)
    lengths = (batch.seq_lens + found[1]).tolist()
    pool.attached["drafts"].commit(batch.req_pool_indices, batch.req_pool_indices_cpu.tolist(), lengths)
    return found

"""Hooks around SGLang's drafts: chains instead of trees, their pages, acceptance, and segment borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_ragged.features.drafts.chains import as_chains, end_at_border
from sgl_ragged.serve.pool import slab_allocator, slab_pool


def draft_chains(
    original: Callable,
    corpus: Any,
    req_ids: list[str],
    batch_tokens: list[list[int]],
    total_lens: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce each tree of the corpus to its longest path; even with breadth 1 a tree has one path per known suffix."""
    tokens, mask = original(corpus, req_ids, batch_tokens, total_lens)
    return as_chains(tokens, mask, corpus.draft_token_num)


def alloc_for_chains(original: Callable, tree_cache: Any, req_to_token_pool: Any, *, reqs: Any, **more: Any) -> None:
    """Reserve pages for the open segments of the next chain; SGLang reserves only pages of slabs, two chains ahead."""
    allocator = slab_allocator(tree_cache.token_to_kv_pool_allocator)
    rows, lengths = [req.kv.req_pool_idx for req in reqs], [req.kv.kv_committed_len for req in reqs]
    allocator.begin_batch()
    with allocator.ahead():
        original(tree_cache, req_to_token_pool, reqs=reqs, **more)
    chains = allocator.open_segments.chains
    demand = chains.demand(rows, lengths)
    pages = allocator.take_pages(tree_cache, demand)
    if pages is None:
        raise RuntimeError(f"no room for {demand} pages of open segments: {tree_cache.available_and_evictable_str()}")
    chains.reserve(rows, lengths, pages)


def begin_chains(original: Callable, batch: Any, verify_input: Any, forward_stream: Any) -> None:
    """Set the lengths of sequences and the pages of open segments at the start of a verification step.

    The hooked function is SGLang's first in the step, and the drafts accepted in the previous step are known by then.
    """
    original(batch, verify_input, forward_stream)
    if batch.forward_mode.is_decode():
        chains = slab_pool(batch.token_to_kv_pool_allocator.get_kvcache()).open_segments.chains
        chains.begin(batch.req_pool_indices, batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist())


def sample_to_border(original: Callable, verify_input: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """End chains at segment borders. The next step learns which drafts were accepted."""
    if not batch.forward_mode.is_idle():
        segment = slab_pool(batch.token_to_kv_pool_allocator.get_kvcache()).page_size
        end_at_border(verify_input.retrieve_next_token, batch.seq_lens, segment)
    return original(verify_input, batch, *args, **more)

"""The hooks of retrieval in a worker, and its retriever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_ragged.launch.options import RaggedOptions

if TYPE_CHECKING:
    import torch

    from sgl_ragged.features.retrieval.retrieval_plan import RetrievalPlan
    from sgl_ragged.features.retrieval.retriever import Retriever
    from sgl_ragged.launch.feature import Worker


def begin_prefill(options: RaggedOptions, original: Callable, batch: Any) -> Any:
    """Tells the retriever how long the prompts are whose chunks are about to be prefilled."""
    from sgl_ragged.features.windows.pool import slab_pool

    prepared = original(batch)
    retriever = slab_pool(batch.token_to_kv_pool_allocator.get_kvcache()).attached["retrieval"]
    for req in batch.reqs:
        retriever.begin(req.kv.req_pool_idx, len(req.full_untruncated_fill_ids))
    return prepared


def name_requests(options: RaggedOptions, original: Callable, worker: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """Tells the retriever whose batch runs: what the attention backend is given in place of it may not say."""
    from sgl_ragged.features.windows.pool import slab_pool

    retriever = slab_pool(worker.model_runner.token_to_kv_pool).attached["retrieval"]
    retriever.running = tuple(batch.req_pool_indices_cpu.tolist())
    try:
        return original(worker, batch, *args, **more)
    finally:
        retriever.running = ()


def forget_pages(options: RaggedOptions, original: Callable, allocator: Any, *page_ids: torch.Tensor) -> Any:
    """Forget what the segments of freed pages dropped."""
    for pages in page_ids:
        allocator.get_kvcache().attached["retrieval"].reservoir.forget(pages)
    return original(allocator, *page_ids)


def forget_all_pages(options: RaggedOptions, original: Callable, allocator: Any) -> Any:
    """The same, where all pages are freed at once."""
    allocator.get_kvcache().attached["retrieval"].reservoir.clear()
    return original(allocator)


def make_retriever(settings: RetrievalPlan, worker: Worker) -> Retriever:
    """The retriever of a worker; each pivot's rank tells the others what it names."""
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.features.retrieval.retriever import Retriever

    plan, store = worker.rank.plan, worker.pool.store
    owners, entries = settings.pivot_ranks(plan), settings.entries(plan, store.dtype.itemsize)
    roles = settings.rank_roles(plan, worker.rank.number)
    if plan.ranks == 1:
        return Retriever(store, settings.asked, roles, entries, worker.req_to_token)
    group = get_parallel().attn_tp_group

    def share(pivot: int, tokens: torch.Tensor) -> None:
        group.broadcast(tokens, src=owners[pivot])

    return Retriever(store, settings.asked, roles, entries, worker.req_to_token, share)

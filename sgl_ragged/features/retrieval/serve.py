"""Retrieval in a worker: the retriever, hooks that report requests and pages to it, and its radix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.features.retrieval.radix_cache import retrieval_cache
from sgl_ragged.features.retrieval.retrieval_plan import RetrievalPlan
from sgl_ragged.features.retrieval.retriever import Retriever
from sgl_ragged.features.retrieval.settings import RADIX_CACHE
from sgl_ragged.features.retrieval.watching import Watching
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker
from sgl_ragged.serve.pool import slab_pool


def begin_prefill(original: Callable, batch: Any) -> Any:
    """Report to the retriever the lengths of prompts whose chunks are about to be prefilled."""
    prepared = original(batch)
    retriever = slab_pool(batch.token_to_kv_pool_allocator.get_kvcache()).attached["retrieval"]
    for req in batch.reqs:
        retriever.begin(req.kv.req_pool_idx, len(req.full_untruncated_fill_ids))
    return prepared


def name_requests(original: Callable, worker: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """Report to the retriever whose batch runs, which the attention backend's batch may not name."""
    retriever = slab_pool(worker.model_runner.token_to_kv_pool).attached["retrieval"]
    retriever.running = tuple(batch.req_pool_indices_cpu.tolist())
    try:
        return original(worker, batch, *args, **more)
    finally:
        retriever.running = ()


def make_retriever(settings: RetrievalPlan, worker: Worker) -> Retriever:
    """Make the retriever of a worker; each pivot's rank broadcasts its tokens."""
    plan, store = worker.rank.plan, worker.pool.store
    owners, entries = settings.pivot_ranks(plan), settings.entries(plan, store.dtype.itemsize)
    roles = settings.rank_roles(plan, worker.rank.number)
    if plan.ranks == 1:
        return Retriever(store, settings.asked, roles, entries, worker.req_to_token)
    group = get_parallel().attn_tp_group

    def share(pivot: int, tokens: torch.Tensor) -> None:
        group.broadcast(tokens, src=owners[pivot])

    return Retriever(store, settings.asked, roles, entries, worker.req_to_token, share)


class Retrieving(ServeFeature):
    """Settings: `retrieval_plan.RetrievalPlan`."""

    name = "retrieval"
    radix_cache = (RADIX_CACHE, retrieval_cache)
    hooks = (
        Hook(f"{sglang.BATCH}.prepare_for_extend", begin_prefill),
        Hook(sglang.RUN_BATCH, name_requests),
    )

    def attach(self, settings: RetrievalPlan, worker: Worker) -> Any:
        worker.pool.attached[self.name] = retriever = make_retriever(settings, worker)
        worker.pool.epilogues.append(Watching(retriever))
        worker.pool.on_free.append(retriever.reservoir.forget)
        worker.pool.on_flush.append(retriever.reservoir.clear)
        return worker.outer

    def server_info(self, settings: RetrievalPlan | None, pool: Any) -> dict[str, Any]:
        if settings is None:
            return {"retrieval": None}
        retriever = pool.attached[self.name]
        shown = {
            "overlay": settings.asked.overlay,
            "pivots": [list(pivot) for pivot in settings.roles.pivots],
            "segments": retriever.reservoir.capacity,
            "reservoir_bytes": retriever.reservoir.nbytes,
            "overlay_bytes": retriever.device_bytes,
        }
        return {"retrieval": shown}


FEATURE = Retrieving()

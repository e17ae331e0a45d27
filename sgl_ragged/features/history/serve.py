"""Bounded histories in a worker: which segments requests see, what the scheduler reserves for them, the radix cache."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.features.history import admission
from sgl_ragged.features.history.bound import RADIX_CACHE
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.history_plan import HistoryPlan, head_weights
from sgl_ragged.features.history.radix_cache import bounded_cache
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker


def make_histories(settings: HistoryPlan, worker: Worker) -> Histories:
    """Make histories of the requests in SGLang's table, with scores of the rank's segments unless age decides."""
    plan, store, bound = worker.rank.plan, worker.pool.store, settings.bound
    scores = None
    if not bound.by_age:
        rank, device = worker.rank.number, store.slabs.device
        means = settings.rank_value_means(plan.heads(rank))
        on_device = None if means is None else [torch.from_numpy(own).float().to(device) for own in means]
        scores = SegmentScores(store, bound.score, torch.from_numpy(head_weights(plan, rank)), on_device)
    if plan.ranks == 1:
        return Histories(bound, worker.req_to_token, plan.segment, scores)
    group, ranks = get_parallel().attn_tp_group, plan.ranks

    def over_ranks(own: torch.Tensor) -> torch.Tensor:
        # Gathered and added in the order of the ranks: all of them get the same bits.
        return group.all_gather(own, dim=0).view(ranks, -1).sum(dim=0)

    return Histories(bound, worker.req_to_token, plan.segment, scores, over_ranks)


class History(ServeFeature):
    """Settings: `history_plan.HistoryPlan`."""

    name = "history"
    radix_cache = (RADIX_CACHE, bounded_cache)
    hooks = (
        Hook(f"{sglang.BATCH}.check_decode_mem", admission.make_room),
        Hook(f"{sglang.ADDER}._get_running_request_total_token_offset", admission.reserve_running),
        Hook(f"{sglang.ADDER}._check_prefill_budget", admission.fits),
        Hook(f"{sglang.ADDER}._update_prefill_budget", admission.reserve_admitted),
        Hook(f"{sglang.CHECKER}._check_kv_page_invariants", admission.check_held_pages),
    )

    def attach(self, settings: HistoryPlan, worker: Worker) -> Any:
        worker.pool.attached[self.name] = worker.pool.views = make_histories(settings, worker)
        return worker.outer

    def server_info(self, settings: HistoryPlan | None, pool: Any) -> dict[str, Any]:
        return {
            "history": settings and settings.bound.limit * pool.page_size,
            "history_score": settings and settings.bound.score,
        }


FEATURE = History()

"""The histories of a worker's pool."""

from __future__ import annotations

import torch
from sglang.srt.runtime_context import get_parallel

from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.history_plan import HistoryPlan, head_weights
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.launch.feature import Worker


def make_histories(settings: HistoryPlan, worker: Worker) -> Histories:
    """Histories of the requests in SGLang's table, with the scores of the rank's segments where these are asked."""
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

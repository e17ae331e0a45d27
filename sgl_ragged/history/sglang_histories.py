"""The histories of a worker's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_ragged.plan import ServingPlan

if TYPE_CHECKING:
    import torch

    from sgl_ragged.history.bound import HistoryBound
    from sgl_ragged.history.histories import Histories
    from sgl_ragged.mem_pool.slab_store import SlabStore


def make_histories(plan: ServingPlan, bound: HistoryBound, store: SlabStore, req_to_token: torch.Tensor) -> Histories:
    import torch
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.history.histories import Histories
    from sgl_ragged.history.segment_scores import SegmentScores

    scores = None
    if not bound.by_age:
        rank, device = get_parallel().attn_tp_rank, store.slabs.device
        means = plan.rank_value_means(rank)
        on_device = None if means is None else [torch.from_numpy(own).float().to(device) for own in means]
        scores = SegmentScores(store, bound.score, torch.from_numpy(plan.head_weights(rank)), on_device)
    if plan.ranks == 1:
        return Histories(bound, req_to_token, plan.segment, scores)
    group, ranks = get_parallel().attn_tp_group, plan.ranks

    def over_ranks(own: torch.Tensor) -> torch.Tensor:
        # Gathered and added in the order of the ranks: all of them get the same bits.
        return group.all_gather(own, dim=0).view(ranks, -1).sum(dim=0)

    return Histories(bound, req_to_token, plan.segment, scores, over_ranks)

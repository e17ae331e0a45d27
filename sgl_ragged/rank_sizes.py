"""What a plan takes on a rank: pages, request rows and bytes. One answer for the launcher, workers and `layout`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import Prefill, Rank, ServingPlan
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages, fit_pool
from sgl_ragged.mem_pool.slab_store import open_pages, side_bytes
from sgl_ragged.scorers import get_scorer


@dataclass(frozen=True)
class RankNeeds:
    """What one rank of a plan needs.

    row_bytes: device bytes per request row for the scorer and features. page_bytes: device bytes per page for features.
    side_pages: pages of a second pool that a feature needs; None where none does.
    """

    rank: Rank
    open_pages: OpenPages
    row_bytes: int
    page_bytes: int
    side_pages: SidePages | None

    def fit(self, budget_bytes: int, max_requests: int | None, max_tokens: int | None) -> PoolSizes:
        """Return the largest pool in a budget. Raises RaggedConfigError where it holds no request.

        Args:
            max_requests: --max-running-requests. max_tokens: --max-total-tokens.
        """
        return fit_pool(
            self.rank.plan.layout(self.rank.number),
            self.rank.itemsize,
            self.open_pages,
            budget_bytes,
            max_requests,
            self.row_bytes,
            max_tokens,
            self.side_pages,
            self.page_bytes,
        )

    def made(self, num_slots: int, num_rows: int, side_pages: int) -> PoolSizes:
        """Return the sizes of a pool with these numbers of pages, request rows and side pages, padding included."""
        sizes = PoolSizes(
            layout=self.rank.plan.layout(self.rank.number),
            itemsize=self.rank.itemsize,
            open_pages=self.open_pages,
            num_slots=num_slots,
            num_rows=num_rows,
            side_bytes=self.row_bytes,
            beside_bytes=self.page_bytes,
        )
        if self.side_pages is None:
            return sizes
        return replace(
            sizes,
            side_pages=side_pages,
            side_page_bytes=self.side_pages.page_bytes,
            side_pages_of=self.side_pages.what,
        )


def rank_needs(
    plan: ServingPlan, stage: int, number: int, prefill: Prefill, kv_dtype: torch.dtype, query_dtype: torch.dtype
) -> RankNeeds:
    """Return what a rank needs.

    Args:
        stage, number: pipeline stage and tensor-parallel rank.
        query_dtype: of queries that are kept for the scorer.

    Raises:
        RaggedConfigError: two features need pages of a second pool.
    """
    rank, scorer = Rank(plan.stage(stage), number, kv_dtype.itemsize, query_dtype.itemsize), get_scorer(plan.scorer)
    settings = [one.settings for one in plan.features]
    every = [(one.name, one.settings.side_pages(rank, prefill)) for one in plan.features]
    side = [(name, pages) for name, pages in every if pages is not None]
    if len(side) > 1:
        raise RaggedConfigError(
            f"{side[0][0]} and {side[1][0]} both need pages of a second pool, and SGLang has one; drop one of the two"
        )
    scored = side_bytes(scorer, rank.plan.layout(number), plan.q_per_kv, query_dtype)
    return RankNeeds(
        rank,
        open_pages(scorer, plan.slab_layouts, plan.q_per_kv, kv_dtype, query_dtype),
        scored + sum(one.row_bytes(rank) for one in settings),
        sum(one.page_bytes(rank) for one in settings),
        side[0][1] if side else None,
    )


def fit_all_ranks(
    plan: ServingPlan,
    prefill: Prefill,
    kv_dtype: torch.dtype,
    query_dtype: torch.dtype,
    budget_bytes: int,
    max_requests: int | None,
    max_tokens: int | None,
) -> PoolSizes:
    """Return the first rank's sizes: all ranks have the pages and requests of the one with the fewest.

    Arguments and errors as in `rank_needs` and `RankNeeds.fit`.
    """
    every = [
        rank_needs(plan, stage, number, prefill, kv_dtype, query_dtype).fit(budget_bytes, max_requests, max_tokens)
        for stage in range(max(len(plan.stages), 1))
        for number in range(plan.ranks)
    ]
    return replace(
        every[0],
        num_slots=min(one.num_slots for one in every),
        num_rows=min(one.num_rows for one in every),
        side_pages=min(one.side_pages for one in every),
    )


def summary(plan: ServingPlan, sizes: PoolSizes) -> list[str]:
    """Return the start-up lines: bytes, tokens, requests, budgets; then pipeline stages and features, if any."""
    *lines, budgets = sizes.describe()
    fit = "not fitted" if plan.unfitted else "fitted"
    stages = [plan.describe_stages(sizes.itemsize)] if plan.stages else []
    chosen = f"{budgets}; ratio {plan.ratio:g}, scorer {plan.scorer}, {fit}, profile {plan.profile}"
    features = [line for one in plan.features if (line := one.settings.describe(sizes)) is not None]
    return [*lines, chosen, *stages, *features]

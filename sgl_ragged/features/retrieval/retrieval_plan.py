"""Settings of retrieval that workers follow: sizes, and roles of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.features.retrieval.roles import ELSEWHERE, HeadRoles
from sgl_ragged.features.retrieval.settings import Retrieval, entry_bytes
from sgl_ragged.launch.plan import FeatureSettings, Rank, ServingPlan
from sgl_ragged.mem_pool.sizing import PoolSizes


@dataclass(frozen=True, eq=False)
class RetrievalPlan(FeatureSettings):
    """Settings of retrieval. asked: sizes from the flags. roles: pivots of the model, and heads that they watch for."""

    asked: Retrieval
    roles: HeadRoles

    @property
    def state(self) -> tuple[Any, ...]:
        return (*self.asked.numbers, np.array(self.roles.pivots), self.roles.watched_by)

    def row_bytes(self, rank: Rank) -> int:
        return self.overlay_bytes(rank.plan, rank.number, rank.itemsize, rank.query_itemsize)

    def describe(self, sizes: PoolSizes) -> str:
        return self.asked.describe(self.roles)

    def rank_roles(self, plan: ServingPlan, rank: int) -> HeadRoles:
        """Return the roles of a rank's heads."""
        return self.roles.on_rank(plan.heads(rank))

    def pivot_ranks(self, plan: ServingPlan) -> list[int]:
        """Return the rank of each pivot."""
        roles = [self.rank_roles(plan, rank) for rank in range(plan.ranks)]
        return [
            next(rank for rank, own in enumerate(roles) if own.pivots[number][1] != ELSEWHERE)
            for number in range(len(self.roles.pivots))
        ]

    def entries(self, plan: ServingPlan, itemsize: int) -> int:
        """Return the segments that the reservoir holds on each rank. Raises as `Retrieval.entries` does."""
        sizes = [
            entry_bytes(layout, self.rank_roles(plan, rank).satellites, itemsize)
            for rank, layout in enumerate(plan.layouts)
        ]
        return self.asked.entries(sizes)

    def overlay_bytes(self, plan: ServingPlan, rank: int, itemsize: int, query_itemsize: int) -> int:
        """Return device bytes of a request's overlays, as `Retrieval.row_bytes` counts them."""
        satellites = sum(map(len, self.rank_roles(plan, rank).satellites))
        return self.asked.row_bytes(satellites, plan.geometry.head_dim, plan.q_per_kv, itemsize, query_itemsize)

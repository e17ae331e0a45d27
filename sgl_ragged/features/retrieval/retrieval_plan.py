"""What --ragged-reservoir and the flags beside it mean for a server: settings, and who watches for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.launch import RetrievalFlags
from sgl_ragged.features.retrieval.roles import ELSEWHERE, HeadRoles, head_roles, with_pivots
from sgl_ragged.features.retrieval.settings import Retrieval, entry_bytes
from sgl_ragged.launch.plan import BudgetChoice, ServingPlan
from sgl_ragged.profiles.budgets import profile_kept
from sgl_ragged.profiles.profile import Profile

DEFAULTS: dict[str, Any] = {"overlay": 128, "pivots": 2, "watch_interval": 8, "drift": 0.5}
"""By field of `RetrievalFlags`."""


@dataclass(frozen=True, eq=False)
class RetrievalPlan:
    """roles: who watches for whom in the model."""

    asked: Retrieval
    roles: HeadRoles

    @property
    def state(self) -> tuple[Any, ...]:
        """For the plan's digest."""
        return (*self.asked.numbers, np.array(self.roles.pivots), self.roles.watched_by)

    def rank_roles(self, plan: ServingPlan, rank: int) -> HeadRoles:
        """Who watches for whom, of the heads of a rank."""
        return self.roles.on_rank(plan.heads(rank))

    def pivot_ranks(self, plan: ServingPlan) -> list[int]:
        """Which rank has each of the pivots."""
        roles = [self.rank_roles(plan, rank) for rank in range(plan.ranks)]
        return [
            next(rank for rank, own in enumerate(roles) if own.pivots[number][1] != ELSEWHERE)
            for number in range(len(self.roles.pivots))
        ]

    def entries(self, plan: ServingPlan, itemsize: int) -> int:
        """Segments that the reservoir holds on each rank. Raises as `Retrieval.entries` does."""
        sizes = [
            entry_bytes(layout, self.rank_roles(plan, rank).satellites, itemsize)
            for rank, layout in enumerate(plan.layouts)
        ]
        return self.asked.entries(sizes)

    def overlay_bytes(self, plan: ServingPlan, rank: int, itemsize: int, query_itemsize: int) -> int:
        """Device bytes of a request's overlays, as `Retrieval.row_bytes` counts them."""
        satellites = sum(map(len, self.rank_roles(plan, rank).satellites))
        return self.asked.row_bytes(satellites, plan.geometry.head_dim, plan.q_per_kv, itemsize, query_itemsize)


def asked_retrieval(flags: RetrievalFlags) -> Retrieval:
    """The settings that were asked for. Raises RaggedConfigError for numbers that are not possible."""
    assert flags.reservoir is not None, "it was asked for"
    chosen = DEFAULTS | {name: getattr(flags, name) for name in DEFAULTS if getattr(flags, name) is not None}
    return Retrieval(
        reservoir_bytes=flags.reservoir,
        overlay=chosen["overlay"],
        pivots=chosen["pivots"],
        interval=chosen["watch_interval"],
        drift=chosen["drift"],
    )


def choose_pivots(chosen: BudgetChoice, count: int, ratio: float, segment: int) -> tuple[HeadRoles, np.ndarray]:
    """The first `count` pivots, and kept tokens like `BudgetChoice.kept` with room for them.

    Raises RaggedConfigError: there is no profile, nobody to watch for, or as `head_roles` and `with_pivots` do.
    """
    found = _profile_with_roles(chosen)
    roles = head_roles(found, count)
    if not any(roles.satellites):
        raise RaggedConfigError(
            f"the {count} pivots of {found.model_id!r} foresee nothing that other heads drop: ask for more of them"
        )
    return roles, with_pivots(lambda share: profile_kept(found, share, segment), roles, ratio, segment)


def _profile_with_roles(chosen: BudgetChoice) -> Profile:
    if chosen.profile is None:
        raise RaggedConfigError(
            "--ragged-reservoir needs to know which heads watch for which, and equal budgets come without: calibrate "
            "(python -m calib run), or let --ragged-profile auto do it"
        )
    return chosen.profile

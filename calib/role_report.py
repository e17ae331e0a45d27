"""Report on the roles of heads in a profile: a row per head, the best pivots, and role counts at other thresholds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calib.roles import assign_roles
from sgl_ragged.features.retrieval.roles import HeadRoles, head_roles
from sgl_ragged.profiles.head_statistics import (
    DROPPED,
    HEAD_STATISTICS,
    OVERLAP,
    PIVOT_ORDER,
    ROLE,
    ROLES,
    SIMILARITY,
    STABILITY,
    WATCHED,
)
from sgl_ragged.profiles.profile import Profile

TAUS = (0.3, 0.4, 0.5, 0.6)
"""Thresholds of stability and similarity that are compared."""


@dataclass(frozen=True)
class HeadRow:
    """One head.

    Args:
        role: HeteroCache's role, as calibrated.
        watched_by: layer and head of the pivot that watches for it, among all pivots of the profile; None for pivots
            and for heads without a watcher.
        coverage: share of the head's attention to dropped tokens that this pivot foresees; None without a watcher.
    """

    layer: int
    head: int
    role: str
    stability: float
    similarity: float
    watched_by: tuple[int, int] | None
    coverage: float | None


@dataclass(frozen=True)
class PivotRow:
    """One pivot.

    Args:
        coverage: share of all heads' attention to dropped tokens that this pivot and those before it foresee, each head
            through its best watcher.
    """

    layer: int
    head: int
    coverage: float


@dataclass(frozen=True)
class RoleCounts:
    """Number of heads in each role, in the order of `head_statistics.ROLES`.

    Args:
        tau: threshold of stability and similarity; None for the roles as calibrated.
    """

    tau: float | None
    heads: tuple[int, ...]


@dataclass(frozen=True)
class RoleReport:
    """Roles in a profile: all heads layer by layer, pivots in their order, and role counts by threshold."""

    heads: tuple[HeadRow, ...]
    pivots: tuple[PivotRow, ...]
    counts: tuple[RoleCounts, ...]


def measure_roles(profile: Profile) -> RoleReport | None:
    """Report the roles of a profile's heads; None if the profile has no statistics of roles."""
    statistics = profile.statistics
    if not set(HEAD_STATISTICS) <= set(statistics):
        return None
    role, stability, similarity, watched = (statistics[name] for name in (ROLE, STABILITY, SIMILARITY, WATCHED))
    num_pivots = int((statistics[PIVOT_ORDER] >= 0).sum())
    watchers = head_roles(profile, num_pivots) if num_pivots else HeadRoles((), np.full(role.shape, -1))
    rows = []
    for layer, head in np.ndindex(role.shape):
        pivot = int(watchers.watched_by[layer, head])
        rows.append(
            HeadRow(
                layer=layer,
                head=head,
                role=ROLES[int(role[layer, head])],
                stability=float(stability[layer, head]),
                similarity=float(similarity[layer, head]),
                watched_by=None if pivot < 0 else watchers.pivots[pivot],
                coverage=None if pivot < 0 else float(watched[layer, head, pivot]),
            )
        )
    dropped = statistics[DROPPED].astype(np.float64)
    pivots = []
    for number, (layer, head) in enumerate(watchers.pivots):
        foreseen = float((watched[..., : number + 1].max(axis=2) * dropped).sum())
        pivots.append(PivotRow(layer, head, foreseen / float(dropped.sum())))
    swept = [(tau, assign_roles(stability, statistics[OVERLAP], tau, tau)) for tau in TAUS]
    counts = [_count_roles(tau, roles) for tau, roles in [(None, role), *swept]]
    return RoleReport(tuple(rows), tuple(pivots), tuple(counts))


def _count_roles(tau: float | None, role: np.ndarray) -> RoleCounts:
    return RoleCounts(tau, tuple(int((role == number).sum()) for number in range(len(ROLES))))

"""What a profile says about the roles of heads: a row per head, the best pivots, and other thresholds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calib.roles import assign_roles
from sgl_ragged.features.retrieval.roles import HeadRoles, head_roles
from sgl_ragged.profiles.budgets import least_ratio
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
"""Thresholds that are compared, of stability and of similarity alike."""


@dataclass(frozen=True)
class HeadRow:
    """One head. `role`: HeteroCache's, as calibrated. `watched_by`: layer and head of the pivot that watches for it, of
    all that the profile names, and `coverage` the share of its attention to dropped tokens that this one foresees; None
    for pivots and for heads that nobody watches for."""

    layer: int
    head: int
    role: str
    stability: float
    similarity: float
    watched_by: tuple[int, int] | None
    coverage: float | None


@dataclass(frozen=True)
class PivotRow:
    """A head that watches. `coverage`: share of all heads' attention to dropped tokens that it and those before it
    foresee, each head through the best of them."""

    layer: int
    head: int
    coverage: float


@dataclass(frozen=True)
class RoleCounts:
    """Heads of each role, in the order of `head_statistics.ROLES`, at a threshold of stability and similarity (None: as
    calibrated), and the smallest ratio that method `roles` can serve then."""

    tau: float | None
    heads: tuple[int, ...]
    least_ratio: float


@dataclass(frozen=True)
class RoleReport:
    """Roles in a profile: all heads, layer by layer, pivots in their order, counts of roles by threshold."""

    heads: tuple[HeadRow, ...]
    pivots: tuple[PivotRow, ...]
    counts: tuple[RoleCounts, ...]


def measure_roles(profile: Profile, segment: int) -> RoleReport | None:
    """Roles of a profile's heads; None if it has no such statistics.

    Args:
        segment: tokens per segment, for the smallest ratios.
    """
    found = profile.statistics
    if not set(HEAD_STATISTICS) <= set(found):
        return None
    role, stability, similarity, watched = (found[name] for name in (ROLE, STABILITY, SIMILARITY, WATCHED))
    known = int((found[PIVOT_ORDER] >= 0).sum())
    watching = head_roles(profile, known) if known else HeadRoles((), np.full(role.shape, -1))
    heads = []
    for layer, head in np.ndindex(role.shape):
        by = int(watching.watched_by[layer, head])
        heads.append(
            HeadRow(
                layer=layer,
                head=head,
                role=ROLES[int(role[layer, head])],
                stability=float(stability[layer, head]),
                similarity=float(similarity[layer, head]),
                watched_by=None if by < 0 else watching.pivots[by],
                coverage=None if by < 0 else float(watched[layer, head, by]),
            )
        )
    dropped = found[DROPPED].astype(np.float64)
    pivots = []
    for number, (layer, head) in enumerate(watching.pivots):
        foreseen = float((watched[..., : number + 1].max(axis=2) * dropped).sum())
        pivots.append(PivotRow(layer, head, foreseen / float(dropped.sum())))
    swept = [(tau, assign_roles(stability, found[OVERLAP], tau, tau)) for tau in TAUS]
    return RoleReport(
        tuple(heads),
        tuple(pivots),
        (_count(None, role, segment), *(_count(tau, roles, segment) for tau, roles in swept)),
    )


def _count(tau: float | None, role: np.ndarray, segment: int) -> RoleCounts:
    counts = tuple(int((role == number).sum()) for number in range(len(ROLES)))
    return RoleCounts(tau, counts, least_ratio(role, segment))

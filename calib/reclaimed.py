"""What heads that share one kept count would leave unreclaimed (TANGRAM section 4.2.2, Fig. 15)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calib.grouping import group_largest
from sgl_ragged.profiles.budgets import UNIT
from sgl_ragged.profiles.profile import Profile

HEADS_PER_GROUP = (1, 2, 4, 8)
ORDERS = ("adjacent", "clustered")


@dataclass(frozen=True)
class Reclaimed:
    """Share of the full KV cache that is freed with groups of this size and order.

    `calibrated`: with the shares as calibrated, min(1, mu + alpha * sigma) (TANGRAM Eq. 5). `served`: with the budgets
    as served, which are multiples of 16 tokens and meet the ratio before heads are grouped.
    """

    heads_per_group: int
    order: str
    calibrated: float
    served: float


def calibrated_shares(profile: Profile) -> np.ndarray:
    """TANGRAM Eq. 5 as written: float64 [layers, heads], the share of a context that each head reserves."""
    mu, sigma = profile.mu.astype(np.float64), profile.sigma.astype(np.float64)
    return np.minimum(mu + profile.alpha * sigma, 1.0)


def measure_reclaimed(profile: Profile, kept: np.ndarray, segment: int) -> tuple[Reclaimed, ...]:
    """Effect of each size and order of groups.

    Args:
        profile: the profile.
        kept: int64 [layers, heads], tokens per segment that the profile's heads keep as served.
        segment: tokens per segment, a multiple of 16.
    """
    shares = calibrated_shares(profile)
    units, top = kept // UNIT, segment // UNIT
    return tuple(
        Reclaimed(
            heads_per_group=size,
            order=order,
            calibrated=float(1.0 - group_largest(shares, size, order).mean()),
            served=float(1.0 - group_largest(units, size, order).mean() / top),
        )
        for size in HEADS_PER_GROUP
        for order in ORDERS
    )

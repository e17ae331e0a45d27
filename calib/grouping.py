"""Memory that is not reclaimed if groups of heads share one kept count (TANGRAM section 4.2.2, Fig. 15)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import UNIT
from sgl_ragged.profiles.profile import Profile

HEADS_PER_GROUP = (1, 2, 4, 8)
ORDERS = ("adjacent", "clustered")


@dataclass(frozen=True)
class Reclaimed:
    """Share of the full KV cache that is freed with groups of one size and order.

    Args:
        calibrated: with the shares as calibrated, min(1, mu + alpha * sigma) (TANGRAM Eq. 5).
        served: with the budgets as served, multiples of 16 tokens that meet the ratio before heads are grouped.
    """

    heads_per_group: int
    order: str
    calibrated: float
    served: float


def measure_reclaimed(profile: Profile, kept: np.ndarray, segment: int) -> tuple[Reclaimed, ...]:
    """Compute the reclaimed share for each size and order of groups.

    Args:
        kept: int64 [layers, heads], tokens per segment that the profile's heads keep as served.
        segment: tokens per segment, a multiple of 16.
    """
    mu, sigma = profile.mu.astype(np.float64), profile.sigma.astype(np.float64)
    shares = np.minimum(mu + profile.alpha * sigma, 1.0)
    kept_units, segment_units = kept // UNIT, segment // UNIT
    return tuple(
        Reclaimed(
            heads_per_group=size,
            order=order,
            calibrated=float(1.0 - group_largest(shares, size, order).mean()),
            served=float(1.0 - group_largest(kept_units, size, order).mean() / segment_units),
        )
        for size in HEADS_PER_GROUP
        for order in ORDERS
    )


def group_largest(budgets: np.ndarray, heads_per_group: int, order: str = "clustered") -> np.ndarray:
    """Give every head the largest budget of its group: a group's storage is as long as its longest head.

    Args:
        budgets: [num_layers, num_heads], kept counts or shares.
        heads_per_group: heads that share one count; the last group of a layer may be smaller.
        order: "clustered" sorts the heads of each layer by budget first (TANGRAM section 4.2.2), "adjacent" groups
            neighbours.

    Returns:
        An array like `budgets`, nowhere smaller than it.

    Raises:
        RaggedConfigError: heads_per_group is not positive, or the order is unknown.
    """
    if heads_per_group < 1:
        raise RaggedConfigError(f"heads per group must be at least 1, not {heads_per_group}")
    if order not in ORDERS:
        raise RaggedConfigError(f"unknown order of heads {order!r}; known: {', '.join(ORDERS)}")
    grouped = np.empty_like(budgets)
    for row, out in zip(budgets, grouped, strict=True):
        heads = np.argsort(row, kind="stable") if order == "clustered" else np.arange(len(row))
        for start in range(0, len(row), heads_per_group):
            members = heads[start : start + heads_per_group]
            out[members] = row[members].max()
    return grouped

"""Names of what profiles say about the roles of heads (HeteroCache, section 4.1)."""

from __future__ import annotations

STABILITY, SIMILARITY, OVERLAP, ROLE = "stability", "similarity", "overlap", "role"
PIVOT_ORDER, WATCHED, DROPPED = "pivot_order", "watched", "dropped"
HEAD_STATISTICS = (STABILITY, SIMILARITY, OVERLAP, ROLE, PIVOT_ORDER, WATCHED, DROPPED)
"""Statistics about the roles of heads, float32, in the profiles that `calib run` makes for every scorer.

stability, similarity [L, H] and overlap [L, H, H], between heads of a layer: HeteroCache Eq. 2, 3 and 1, in [0, 1].
role [L, H]: places in ROLES.
pivot_order [L, H]: 0, 1, .. for the heads that watch best, in the order of a greedy choice, -1 for others.
watched [L, H, PIVOTS]: share of the attention to dropped tokens that each of these foresees, 0 if its layer is later.
dropped [L, H]: that attention itself, the mean over windows of queries.
"""

ROLES = ("volatile", "anchor", "pivot", "satellite")
"""Roles of heads (HeteroCache section 4.1), in the order of their numbers in statistic `role`."""

KEPT_WHOLE = ("volatile", "pivot")
"""Roles whose heads keep everything (HeteroCache section 4.2)."""

PIVOTS = 8
"""How many heads have a place in `pivot_order`, at most."""

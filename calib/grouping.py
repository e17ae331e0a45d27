"""Heads that share one kept count (TANGRAM section 4.2.2): what larger pages would cost."""

from __future__ import annotations

import numpy as np

from sgl_ragged.errors import RaggedConfigError

ORDERS = ("clustered", "adjacent")


def group_largest(budgets: np.ndarray, heads_per_group: int, order: str = "clustered") -> np.ndarray:
    """Give every head the largest budget of its group: a group's storage is as long as its longest head.

    Args:
        budgets: [num_layers, num_heads], kept counts or shares.
        heads_per_group: heads that share one count; the last group of a layer may be smaller.
        order: "clustered" sorts the heads of each layer by budget first (TANGRAM section 4.2.2), "adjacent" takes
            them as they come.

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

"""Statistics of heads in a profile: their names, shapes and ranges. L layers, H heads.

Roles of heads, and the measures they are made from, are HeteroCache's (section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sgl_ragged.profiles.codebook import codebook_faults

VALUE_MEAN = "value_mean"
"""float32 [L, H, head_dim]: mean value of each head over all tokens. Every calibrated profile has it."""

STABILITY, SIMILARITY, OVERLAP, ROLE = "stability", "similarity", "overlap", "role"
PIVOT_ORDER, WATCHED, DROPPED = "pivot_order", "watched", "dropped"
HEAD_STATISTICS = (STABILITY, SIMILARITY, OVERLAP, ROLE, PIVOT_ORDER, WATCHED, DROPPED)
"""Statistics about the roles of heads, float32, in every profile that `calib run` makes.

stability, similarity: [L, H], in [0, 1], HeteroCache Eq. 2 and 3.
overlap: [L, H, H], in [0, 1], between heads of one layer, Eq. 1.
role: [L, H], index into ROLES.
pivot_order: [L, H], 0, 1, .. for the heads that watch best, in the order of a greedy choice; -1 for all other heads.
watched: [L, H, PIVOTS], share of the head's attention to dropped tokens that each pivot foresees; 0 for pivots in later
    layers.
dropped: [L, H], attention to dropped tokens, mean over windows of queries.
"""

ROLES = ("volatile", "anchor", "pivot", "satellite")
"""Roles of heads, in the order of their numbers in statistic `role`."""

PIVOTS = 8
"""Maximum number of heads in `pivot_order`."""

ROUNDING = 1e-4
"""Tolerance for bounds of means that are stored in float32."""


def statistic_faults(statistics: Mapping[str, np.ndarray], shape: tuple[int, int], head_dim: int) -> Iterator[str]:
    """Yield what is wrong with a profile's statistics, one reason each.

    Args:
        statistics: arrays [L, H, ...] by name, [L, 1, ...] where the heads of a layer share them.
        shape: (L, H).
    """
    for name, array in statistics.items():
        if array.shape[:2] not in (shape, (shape[0], 1)) or 0 in array.shape:
            yield f"statistic {name} {array.shape} must be [layers, heads or 1, ...]"
        yield from range_faults(f"statistic {name}", array, -np.inf, np.inf)
    # Dimensions after [L, H], and the range of the entries.
    for name, dimensions, low, high in (
        (VALUE_MEAN, (head_dim,), -np.inf, np.inf),
        (STABILITY, (), 0.0, 1.0),
        (SIMILARITY, (), 0.0, 1.0),
        (OVERLAP, (shape[1],), 0.0, 1.0),
        (ROLE, (), 0.0, len(ROLES) - 1.0),
        (PIVOT_ORDER, (), -1.0, PIVOTS - 1.0),
        (DROPPED, (), 0.0, np.inf),
    ):
        if name in statistics:
            if statistics[name].shape != (*shape, *dimensions):
                yield f"statistic {name} {statistics[name].shape} must be {[*shape, *dimensions]}"
            yield from range_faults(f"statistic {name}", statistics[name], low, high)
    yield from _pivot_faults(statistics, shape)
    yield from codebook_faults(statistics, shape, head_dim)


def _pivot_faults(statistics: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Iterator[str]:
    for name in (ROLE, PIVOT_ORDER):
        if name in statistics and (statistics[name] != np.round(statistics[name])).any():
            yield f"statistic {name} must be whole numbers"
    if PIVOT_ORDER not in statistics:
        return
    numbers = np.sort(statistics[PIVOT_ORDER][statistics[PIVOT_ORDER] >= 0])
    if (numbers != np.arange(len(numbers))).any():
        yield f"statistic {PIVOT_ORDER} must number the pivots 0, 1, .., each once"
    if WATCHED in statistics:
        watched = statistics[WATCHED]
        if watched.ndim != 3 or watched.shape[:2] != shape or watched.shape[2] < len(numbers):
            yield f"statistic {WATCHED} {watched.shape} must be {[*shape, 'pivots']}, and there are {len(numbers)}"
        yield from range_faults(f"statistic {WATCHED}", watched, 0.0, 1.0, "it is a share of attention")


def range_faults(name: str, array: np.ndarray, low: float, high: float, why: str = "") -> Iterator[str]:
    """Yield a reason if entries are not finite in float32, in which they are used, or outside [low, high]."""
    with np.errstate(over="ignore"):
        stored = array.astype(np.float32)
    if not np.isfinite(stored).all():
        yield f"{name} has non-finite entries"
    elif (stored < low - ROUNDING * (low != 0)).any() or (stored > high + ROUNDING).any():
        yield f"{name} has entries outside [{low:g}, {high:g}]" + (f"; {why}" if why else "")

"""Division of a layer's heads over ranks, equally many on each, with the smallest load on the fullest rank.

The division is optimal for layers of up to EXACT_HEADS heads and for two heads per rank. Otherwise `least_possible`
bounds the distance from the optimum. Loads are integers in any unit.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

EXACT_HEADS = 16
"""Maximum number of heads in a layer for an exhaustive search."""


def permute_layer(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Divide the heads of one layer over ranks.

    The contiguous division is kept if no other is better. Otherwise heads go, largest first, to the rank with the
    smallest load so far; then heads of the fullest rank are exchanged while that lowers its load; then, for up to
    EXACT_HEADS heads, branch and bound finds the optimum.

    Args:
        loads: int [num_heads], non-negative.
        ranks: a divisor of num_heads.

    Returns:
        int64 [ranks, num_heads / ranks]: the heads of each rank, ascending.
    """
    heads = len(loads)
    contiguous = np.arange(heads, dtype=np.int64).reshape(ranks, -1)
    bound = least_possible(loads, ranks)
    if loads[contiguous].sum(axis=1).max() <= bound:
        return contiguous
    division = _exchange(_largest_first(loads, ranks), loads, bound)
    if heads <= EXACT_HEADS and loads[division].sum(axis=1).max() > bound:
        division = _search(division, loads, bound)
    if loads[division].sum(axis=1).max() >= loads[contiguous].sum(axis=1).max():
        return contiguous
    return np.sort(division, axis=1)


def least_possible(loads: np.ndarray, ranks: int) -> int:
    """Return a lower bound on the fullest rank's load in any division into equal numbers of heads.

    The fullest rank has at least the mean load. Also, one rank has t + 1 of the t * ranks + 1 largest heads: its load
    is at least that of the t + 1 smallest among them and of the smallest heads of all that complete its number.

    Args:
        loads: int [num_heads].
    """
    descending = -np.sort(-loads.astype(np.int64))
    heads_per_rank = len(loads) // ranks
    smallest_sums = np.concatenate([[0], np.cumsum(descending[::-1])])
    bounds = [
        int(descending[t * ranks - t : t * ranks + 1].sum() + smallest_sums[heads_per_rank - t - 1])
        for t in range(heads_per_rank)
        if t * ranks < len(loads)
    ]
    return max(-(-int(loads.sum()) // ranks), *bounds)


def _largest_first(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Give each head, largest first, to the rank with the smallest load: int64 [ranks, num_heads / ranks].

    With two heads per rank this pairs the largest with the smallest head, and so on, which is optimal.
    """
    heads_per_rank = len(loads) // ranks
    division: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for head in np.argsort(-loads, kind="stable").tolist():
        open_ranks = (r for r in range(ranks) if len(division[r]) < heads_per_rank)
        rank = min(open_ranks, key=lambda r: (sums[r], len(division[r]), r))
        division[rank].append(head)
        sums[rank] += int(loads[head])
    return np.array(division, dtype=np.int64)


def _exchange(division: np.ndarray, loads: np.ndarray, bound: int) -> np.ndarray:
    """Exchange heads of the fullest rank for smaller heads of other ranks while the larger of the two sums falls."""
    division = division.copy()
    while True:
        sums = loads[division].sum(axis=1)
        fullest = int(sums.argmax())
        if sums[fullest] <= bound:
            return division
        # moved[i, r, j]: load that the fullest rank loses if it exchanges its head i for head j of rank r.
        moved = loads[division[fullest]][:, None, None] - loads[division][None]
        larger = np.maximum(sums[fullest] - moved, sums[None, :, None] + moved)
        larger[:, fullest] = sums[fullest]
        own, rank, other = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[own, rank, other] >= sums[fullest]:
            return division
        division[fullest, own], division[rank, other] = division[rank, other], division[fullest, own]


@cache
def _subsets(heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """List all sets of `size` heads: int64 [sets, size] members, and int64 [sets] with a bit for each head."""
    members = np.array(list(itertools.combinations(range(heads), size)), dtype=np.int64)
    return members, (1 << members).sum(axis=1)


def _search(division: np.ndarray, loads: np.ndarray, bound: int) -> np.ndarray:
    """Find the best division by branch and bound; return `division` if no other is better.

    Each step chooses a set of heads for one rank, among the sets that contain the largest unassigned head.
    """
    ranks, heads_per_rank = division.shape
    order = np.argsort(-loads, kind="stable")
    members, bits = _subsets(len(loads), heads_per_rank)
    sums = loads[order][members].sum(axis=1)
    best = int(loads[division].sum(axis=1).max())
    chosen: list[int] | None = None

    def descend(taken: list[int], disjoint: np.ndarray, used_bits: int, remaining: int) -> None:
        """Assign sets to the remaining ranks.

        Args:
            taken: sets of the ranks that have heads.
            disjoint: sets that overlap with no taken set.
            used_bits: heads of the taken sets, a bit for each.
            remaining: load of all other heads.
        """
        nonlocal best, chosen
        empty_ranks = ranks - len(taken)
        first = next(head for head in range(len(loads)) if not used_bits >> head & 1)
        candidates = disjoint[(bits[disjoint] >> first & 1).astype(bool)]
        if empty_ranks == 2:
            fullest = np.maximum(sums[candidates], remaining - sums[candidates])
            index = int(fullest.argmin())
            largest = max([int(fullest[index]), *(int(sums[t]) for t in taken)])
            if largest < best:
                rest = np.flatnonzero(bits == (1 << len(loads)) - 1 - used_bits - bits[candidates[index]])
                best, chosen = largest, [*taken, int(candidates[index]), int(rest[0])]
            return
        # The fullest set first leaves the smallest load, so that good divisions are found early.
        for subset in candidates[np.argsort(-sums[candidates], kind="stable")].tolist():
            after = remaining - int(sums[subset])
            if best <= bound or after > (empty_ranks - 1) * (best - 1):
                return
            if sums[subset] < best:
                rest_disjoint = disjoint[bits[disjoint] & bits[subset] == 0]
                descend([*taken, subset], rest_disjoint, used_bits | int(bits[subset]), after)

    descend([], np.arange(len(bits)), 0, int(loads.sum()))
    return division if chosen is None else order[members[chosen]]

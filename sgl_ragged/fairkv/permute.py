"""Equally many heads on every rank, so that the rank with most to read has as little as possible.

Up to EXACT_HEADS heads of a layer the division is optimal, and so it is for two heads a rank; beyond, `least_possible`
bounds how far it can be off. Loads are integers in any unit.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

EXACT_HEADS = 16
"""Layers of at most this many heads are searched to the end."""


def permute_layer(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Divide the heads of one layer.

    The heads as they stand are kept if no division is better. Otherwise the heads go one by one, largest first, to the
    rank with the least so far; then heads of the fullest rank are exchanged while that makes it less full; then, up to
    EXACT_HEADS heads, everything that could still be better is searched.

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
    found = _exchange(_largest_first(loads, ranks), loads, bound)
    if heads <= EXACT_HEADS and loads[found].sum(axis=1).max() > bound:
        found = _search(found, loads, bound)
    if loads[found].sum(axis=1).max() >= loads[contiguous].sum(axis=1).max():
        return contiguous
    return np.sort(found, axis=1)


def least_possible(loads: np.ndarray, ranks: int) -> int:
    """A bound: no division of the heads int [num_heads] into equal numbers has a fullest rank with less.

    The fullest rank has at least the mean. And of the t * ranks + 1 largest heads, some rank has t + 1: at least the
    t + 1 smallest of them, beside as many of the smallest of all as complete its number.
    """
    descending = -np.sort(-loads.astype(np.int64))
    each = len(loads) // ranks
    below = np.concatenate([[0], np.cumsum(descending[::-1])])
    crowded = [
        int(descending[t * ranks - t : t * ranks + 1].sum() + below[each - t - 1])
        for t in range(each)
        if t * ranks < len(loads)
    ]
    return max(-(-int(loads.sum()) // ranks), *crowded)


def _largest_first(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Int64 [ranks, num_heads / ranks]. Of two heads a rank, the largest gets the smallest, and so on: the optimum."""
    each = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for head in np.argsort(-loads, kind="stable").tolist():
        rank = min((r for r in range(ranks) if len(held[r]) < each), key=lambda r: (filled[r], len(held[r]), r))
        held[rank].append(head)
        filled[rank] += int(loads[head])
    return np.array(held, dtype=np.int64)


def _exchange(held: np.ndarray, loads: np.ndarray, bound: int) -> np.ndarray:
    """Exchange a head of the fullest rank for a smaller one of another, as long as the larger of the two sums falls."""
    held = held.copy()
    while True:
        sums = loads[held].sum(axis=1)
        full = int(sums.argmax())
        if sums[full] <= bound:
            return held
        # moved[i, r, j]: what the fullest rank gives away if its head i goes to rank r for head j.
        moved = loads[held[full]][:, None, None] - loads[held][None]
        larger = np.maximum(sums[full] - moved, sums[None, :, None] + moved)
        larger[:, full] = sums[full]
        place, rank, other = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[place, rank, other] >= sums[full]:
            return held
        held[full, place], held[rank, other] = held[rank, other], held[full, place]


@cache
def _subsets(heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """All sets of `size` heads: int64 [sets, size], and int64 [sets] with a bit for each head."""
    members = np.array(list(itertools.combinations(range(heads), size)), dtype=np.int64)
    return members, (1 << members).sum(axis=1)


def _search(held: np.ndarray, loads: np.ndarray, bound: int) -> np.ndarray:
    """The best division, `held` if none is better: branch and bound over the sets that hold the largest head left."""
    ranks, each = held.shape
    order = np.argsort(-loads, kind="stable")
    members, bits = _subsets(len(loads), each)
    sums = loads[order][members].sum(axis=1)
    best = int(loads[held].sum(axis=1).max())
    chosen: list[int] | None = None

    def descend(taken: list[int], left: np.ndarray, used: int, remaining: int) -> None:
        """`left`: the sets that overlap none of those taken. The ranks without heads share the load `remaining`."""
        nonlocal best, chosen
        empty = ranks - len(taken)
        first = next(head for head in range(len(loads)) if not used >> head & 1)
        fits = left[(bits[left] >> first & 1).astype(bool)]
        if empty == 2:
            fullest = np.maximum(sums[fits], remaining - sums[fits])
            pick = int(fullest.argmin())
            largest = max([int(fullest[pick]), *(int(sums[t]) for t in taken)])
            if largest < best:
                rest = np.flatnonzero(bits == (1 << len(loads)) - 1 - used - bits[fits[pick]])
                best, chosen = largest, [*taken, int(fits[pick]), int(rest[0])]
            return
        # Fullest first: what is left is then the least, and good divisions are found early.
        for subset in fits[np.argsort(-sums[fits], kind="stable")].tolist():
            after = remaining - int(sums[subset])
            if best <= bound or after > (empty - 1) * (best - 1):
                return
            if sums[subset] < best:
                descend([*taken, subset], left[bits[left] & bits[subset] == 0], used | int(bits[subset]), after)

    descend([], np.arange(len(bits)), 0, int(loads.sum()))
    return held if chosen is None else order[members[chosen]]

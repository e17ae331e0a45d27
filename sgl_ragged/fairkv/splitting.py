"""One more place on every rank is enough to split heads so that all ranks have equally much to read.

With k - 1 heads a rank and one extra place, every layer reaches the least load that any division could: the mean,
rounded up to a whole unit. Proof, which is also the algorithm: sort the heads left by load, and look at all runs of
k - 1 neighbours. The first run has at most the mean of the ranks left. If the last run also fits below the target T,
so does every run, and T is met without splitting. Otherwise take the last run W that fits: the next one drops its
smallest head and takes the next larger head x, and exceeds T, so W and x together exceed it, too. A rank takes W and
of x what is missing to T: k places, exactly T. k - 1 heads are gone, x stays with the rest, and the ranks left have at
most T each on average. Repeat.
"""

from __future__ import annotations

import numpy as np

Shares = list[dict[int, int]]
"""Per rank: head -> units of it that the rank holds; 0 where the head has a place but nothing is stored."""


def split_layer(units: np.ndarray, ranks: int) -> Shares:
    """Divide the heads of one layer over places, num_heads / ranks + 1 on each rank.

    Places that the proof leaves over get a unit of some head wherever moving one or exchanging two fills no rank beyond
    the target; the others hold nothing.

    Args:
        units: int [num_heads], at least 1 each.
        ranks: at least 2, a divisor of num_heads.

    Returns:
        What every rank holds: num_heads / ranks + 1 different heads. No rank has more than ceil(sum(units) / ranks)
        units, and the units of each head sum to what it has.
    """
    target = -(-int(units.sum()) // ranks)
    shares = _runs(units, ranks, target)
    places = len(units) // ranks + 1
    for rank in range(ranks):
        while len(shares[rank]) < places and _borrow(shares, rank, places, target):
            pass
    for held in shares:
        _reserve(held, shares, len(units), places)
    return shares


def _runs(units: np.ndarray, ranks: int, target: int) -> Shares:
    each = len(units) // ranks
    left = [(int(units[head]), int(head)) for head in np.argsort(units, kind="stable")]
    shares: Shares = []
    while left:
        sums = [sum(size for size, _ in left[i : i + each]) for i in range(len(left) - each + 1)]
        start = max(i for i, total in enumerate(sums) if total <= target)
        shares.append({head: size for size, head in left[start : start + each]})
        if start + each < len(left) and sums[start] < target:
            size, head = left[start + each]
            shares[-1][head] = target - sums[start]
            left[start + each] = (size - shares[-1][head], head)
        left = sorted(left[:start] + left[start + each :])
    return shares


def _borrow(shares: Shares, rank: int, places: int, target: int) -> bool:
    """Give a rank one unit of a head that it does not have yet; False if none can be moved below the target.

    A full rank gives a unit of another head away in exchange, to a rank that has a place for it.
    """
    mine = shares[rank]
    filled = [sum(held.values()) for held in shares]
    donors = sorted(
        (-size, head, other)
        for other, held in enumerate(shares)
        for head, size in held.items()
        if size > 1 and head not in mine
    )
    for _, head, other in donors:
        if filled[rank] < target:
            shares[other][head] -= 1
            mine[head] = 1
            return True
        for given in sorted(mine, key=lambda h: (-mine[h], h)):
            for taker, held in enumerate(shares):
                below = taker == other or filled[taker] < target
                if mine[given] > 1 and taker != rank and below and (given in held or len(held) < places):
                    shares[other][head] -= 1
                    mine[given] -= 1
                    held[given] = held.get(given, 0) + 1
                    mine[head] = 1
                    return True
    return False


def _reserve(held: dict[int, int], shares: Shares, heads: int, places: int) -> None:
    """Fill up with heads of which nothing is stored here, those first that are split anyway."""
    copies = [sum(head in other for other in shares) for head in range(heads)]
    for head in sorted(range(heads), key=lambda h: (copies[h] < 2, h)):
        if len(held) == places:
            return
        held.setdefault(head, 0)

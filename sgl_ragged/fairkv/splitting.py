"""Division of heads over ranks with split heads: one extra place per rank is enough for equal loads.

With k - 1 heads per rank and one extra place, every layer reaches the smallest load that any division could: the mean
T, rounded up to a whole unit. Proof, which is also the algorithm: sort the remaining heads by load, and consider all
runs of k - 1 neighbours. The first run has at most the mean load of the remaining ranks. If the last run fits below T,
so does every run, and T is met without splitting. Otherwise take the last run W that fits. The next run drops W's
smallest head, adds the next larger head x, and exceeds T, so W and x together exceed T, too. A rank takes W and the
part of x that fills it to T: k places, exactly T. Then k - 1 heads are assigned, the rest of x remains, and the
remaining ranks have at most T each on average. Repeat.
"""

from __future__ import annotations

import numpy as np

Shares = list[dict[int, int]]
"""Per rank: units that the rank holds by head; 0 if the head has a place that stores nothing."""


def split_layer(units: np.ndarray, ranks: int) -> Shares:
    """Divide the heads of one layer over places, num_heads / ranks + 1 on each rank.

    A place that the algorithm leaves empty gets one unit of a head, if moving one unit or exchanging two keeps all
    ranks at the target; otherwise it stores nothing.

    Args:
        units: int [num_heads], at least 1 each.
        ranks: at least 2, a divisor of num_heads.

    Returns:
        Shares of num_heads / ranks + 1 different heads per rank. No rank has more than ceil(sum(units) / ranks) units,
        and the units of each head sum to `units`.
    """
    target = -(-int(units.sum()) // ranks)
    shares = _divide_by_runs(units, ranks, target)
    places = len(units) // ranks + 1
    for rank in range(ranks):
        while len(shares[rank]) < places and _borrow_unit(shares, rank, places, target):
            pass
    for share in shares:
        _fill_places(share, shares, len(units), places)
    return shares


def _divide_by_runs(units: np.ndarray, ranks: int, target: int) -> Shares:
    heads_per_rank = len(units) // ranks
    remaining = [(int(units[head]), int(head)) for head in np.argsort(units, kind="stable")]
    shares: Shares = []
    while remaining:
        starts = range(len(remaining) - heads_per_rank + 1)
        sums = [sum(size for size, _ in remaining[start : start + heads_per_rank]) for start in starts]
        start = max(i for i, total in enumerate(sums) if total <= target)
        end = start + heads_per_rank
        shares.append({head: size for size, head in remaining[start:end]})
        if end < len(remaining) and sums[start] < target:
            size, head = remaining[end]
            shares[-1][head] = target - sums[start]
            remaining[end] = (size - shares[-1][head], head)
        remaining = sorted(remaining[:start] + remaining[end:])
    return shares


def _borrow_unit(shares: Shares, rank: int, places: int, target: int) -> bool:
    """Give a rank one unit of a head that it does not have yet.

    A full rank gives a unit of another head in exchange, to a rank that has a place for it.

    Returns:
        False if no unit can be moved without exceeding the target.
    """
    own = shares[rank]
    sums = [sum(share.values()) for share in shares]
    donors = sorted(
        (-size, head, donor)
        for donor, share in enumerate(shares)
        for head, size in share.items()
        if size > 1 and head not in own
    )
    for _, head, donor in donors:
        if sums[rank] < target:
            shares[donor][head] -= 1
            own[head] = 1
            return True
        for exchanged in sorted(own, key=lambda h: (-own[h], h)):
            for taker, share in enumerate(shares):
                has_room = taker == donor or sums[taker] < target
                has_place = exchanged in share or len(share) < places
                if own[exchanged] > 1 and taker != rank and has_room and has_place:
                    shares[donor][head] -= 1
                    own[exchanged] -= 1
                    share[exchanged] = share.get(exchanged, 0) + 1
                    own[head] = 1
                    return True
    return False


def _fill_places(share: dict[int, int], shares: Shares, num_heads: int, places: int) -> None:
    """Fill a rank's places with heads of which it stores nothing, preferably heads that are split anyway."""
    copies = [sum(head in other for other in shares) for head in range(num_heads)]
    for head in sorted(range(num_heads), key=lambda h: (copies[h] < 2, h)):
        if len(share) == places:
            return
        share.setdefault(head, 0)

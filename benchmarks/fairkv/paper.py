"""FairKV's own planner, Algorithms 1 and 2 as printed: the reference for small layers. It visits all divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

Scheme = tuple[tuple[int, ...], ...]
"""Per rank, the heads that it holds; a head that stands on c ranks is shared equally by them."""


def algorithm1(heads: Sequence[int], max_copied: int) -> list[tuple[int, ...]]:
    """All lists in which each head occurs once or several times (Algorithm 1, "all possible partitions of L").

    The printed procedure takes `max_copied` (m) and never uses it; here it limits what all heads together occur more
    often than once, as in the paper's Figure 5. Line 10 is kept beside it.
    """
    found: list[tuple[int, ...]] = []

    def backtrack(index: int, partial: list[int]) -> None:
        if index == len(heads):
            found.append(tuple(partial))
            return
        backtrack(index + 1, [*partial, heads[index]])
        left = max_copied - (len(partial) - index)
        for copies in range(2, min(len(heads) - index + len(partial) + 1, left + 1) + 1):
            backtrack(index + 1, [*partial, *[heads[index]] * copies])

    backtrack(0, [])
    return found


def algorithm2(partitions: Sequence[tuple[int, ...]], weights: Sequence[int], ranks: int, places: int) -> Scheme:
    """The scheme with the least difference between the fullest and the emptiest rank (Algorithm 2).

    The paper leaves SplitIntoTPGroups open. Here it gives all ways to put a list's entries on the ranks, at most
    `places` on each and no head twice on one (Appendix A assigns a head to a GPU or not). The first scheme wins ties.

    Args:
        partitions: of Algorithm 1.
        weights: W of one layer, per head.
        ranks: tensor-parallel size.
        places: heads that a rank can hold.
    """
    least: Fraction | None = None
    best: Scheme = ()
    for partition in partitions:
        adjusted = {head: Fraction(weights[head], partition.count(head)) for head in partition}
        for scheme in _split_into_groups(partition, ranks, places):
            loads = [sum((adjusted[head] for head in group), Fraction(0)) for group in scheme]
            if least is None or max(loads) - min(loads) < least:
                least, best = max(loads) - min(loads), scheme
    return best


def scheme_loads(scheme: Scheme, weights: Sequence[int]) -> list[Fraction]:
    """What each rank reads."""
    occurs = [head for group in scheme for head in group]
    return [sum((Fraction(weights[head], occurs.count(head)) for head in group), Fraction(0)) for group in scheme]


def _split_into_groups(partition: tuple[int, ...], ranks: int, places: int) -> Iterator[Scheme]:
    """Ranks are alike, so an entry goes to a rank that is in use or to the first that is not."""

    def assign(at: int, groups: Scheme) -> Iterator[Scheme]:
        if at == len(partition):
            yield groups
            return
        for rank, group in enumerate(groups):
            if len(group) < places and partition[at] not in group:
                yield from assign(at + 1, (*groups[:rank], (*group, partition[at]), *groups[rank + 1 :]))
            if not group:
                return

    yield from assign(0, ((),) * ranks)

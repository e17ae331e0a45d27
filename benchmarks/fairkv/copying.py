"""Fair-copying (FairKV, section 4): a head has copies on several ranks, each for an equal part of the requests.

Planned and reported beside the others, not served: a request's part of a head is whole on one rank, so loads are even
on average over many requests alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.permute import permute_layer
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import MODES as SERVED
from sgl_ragged.fairkv.planner import best_placement, check_kept, permuted, plan_placement

MODES = (*SERVED[:-1], "copy", SERVED[-1])
"""The planner's modes and the paper's fair-copying."""

MOST_VECTORS = 20_000
"""Up to so many ways to hand out copies, all of them are considered; beyond, those that copy the largest part first."""

MOST_STEPS = 1_500
"""Pieces that the search of one layer may place: deterministic, where a time limit would not be."""


@dataclass(frozen=True, eq=False)
class FairCopies(Placement):
    """Heads and their copies. `kept` differs from a placement's: what a request that is served at a place stores there.

    That is the head's whole kept count at each of its places, 0 where a place holds nothing.
    """

    @property
    def copies(self) -> np.ndarray:
        """int64 [num_layers, ranks, places]: places of the head that each place holds, 0 where it holds nothing."""
        counts = np.zeros((len(self.heads), int(self.heads.max()) + 1), dtype=np.int64)
        layers = np.broadcast_to(np.arange(len(self.heads))[:, None, None], self.heads.shape)
        np.add.at(counts, (layers, self.heads), self.kept > 0)
        return np.where(self.kept > 0, counts[layers, self.heads], 0)

    @property
    def load(self) -> np.ndarray:
        """float64 [num_layers, ranks]: tokens of each sealed segment that a rank reads, mean over requests."""
        return (self.kept / np.maximum(self.copies, 1)).sum(axis=2)


def place_any(
    kept: np.ndarray, ranks: int, mode: str, *, extra_places: int = 1, cost: CostModel | None = None
) -> Placement:
    """`planner.plan_placement` with mode `copy`, too, which gives `FairCopies` wherever heads have copies."""
    if mode != "copy":
        return plan_placement(kept, ranks, mode, extra_places=extra_places, cost=cost)
    if ranks == 1:
        return replace(plan_placement(kept, ranks, "none", extra_places=extra_places), mode=mode)
    kept = check_kept(kept, ranks, extra_places)
    whole = permuted(kept, ranks, mode)
    widest = min(extra_places, kept.shape[1] - whole.places)
    return best_placement([whole, *(copy_heads(kept, ranks, extra) for extra in range(1, widest + 1))], cost)


def copy_heads(kept: np.ndarray, ranks: int, extra_places: int) -> FairCopies:
    """`copy_layer` for every layer of kept counts int [num_layers, num_heads]."""
    num_layers, num_heads = kept.shape
    places = min(num_heads // ranks + extra_places, num_heads)
    heads = np.empty((num_layers, ranks, places), dtype=np.int64)
    held = np.zeros_like(heads)
    for layer, row in enumerate(kept):
        for rank, members in enumerate(copy_layer(row, ranks, places)):
            others = [head for head in range(num_heads) if head not in members]
            both = sorted([*members, *others[: places - len(members)]])
            heads[layer, rank] = both
            held[layer, rank] = [row[head] if head in members else 0 for head in both]
    return FairCopies(heads=heads, kept=held, mode="copy")


def copy_layer(loads: np.ndarray, ranks: int, places: int) -> list[set[int]]:
    """Heads of each rank, at most `places` of them; a head that c ranks hold is load / c on each.

    The search starts from the heads without copies, as `permute_layer` divides them. Ways to hand out copies are tried
    in the order of a lower bound, each by branch and bound over the ranks, until none can be better or MOST_STEPS are
    taken. For a handful of heads that is the optimum.

    Args:
        loads: int [num_heads], positive.
        ranks: a divisor of num_heads.
        places: of each rank, at least num_heads / ranks.
    """
    # In this unit every load is a whole number however many copies share it.
    whole = loads.astype(np.int64) * math.lcm(*range(1, ranks + 1))
    vectors = _copy_counts(whole, ranks, ranks * places - len(loads))
    pieces = whole // vectors
    # The rank with the largest piece holds at least what the others have no places for.
    beside = np.maximum(vectors.sum(axis=1) - (ranks - 1) * places - 1, 0)
    bounds = np.maximum(-(-int(whole.sum()) // ranks), pieces.max(axis=1) + beside * pieces.min(axis=1))
    uncopied = permute_layer(whole, ranks)
    search = _Search(places, int(whole[uncopied].sum(axis=1).max()), uncopied.tolist())
    for index in np.argsort(bounds, kind="stable").tolist():
        if search.steps >= MOST_STEPS or search.best <= bounds[index]:
            break
        listed = [(int(size), head) for head, size in enumerate(pieces[index]) for _ in range(vectors[index, head])]
        search.pack(sorted(listed, key=lambda piece: (-piece[0], piece[1])), int(bounds[index]))
    return [set(members) for members in search.found]


def _copy_counts(whole: np.ndarray, ranks: int, spare: int) -> np.ndarray:
    """int64 [ways, num_heads]: copies of each head, 1 to `ranks`, at most `spare` beyond the first."""
    if math.comb(len(whole) + spare, spare) <= MOST_VECTORS:
        return _all_copy_counts(len(whole), ranks, spare)
    counts = np.ones(len(whole), dtype=np.int64)
    ways = [counts.copy()]
    for _ in range(spare):
        part = np.where(counts < ranks, whole // counts, -1)
        counts[int(part.argmax())] += part.max() > 0
        ways.append(counts.copy())
    return np.array(ways)


@cache
def _all_copy_counts(heads: int, ranks: int, spare: int) -> np.ndarray:
    ways = [
        np.bincount(copied, minlength=heads) + 1
        for extra in range(spare + 1)
        for copied in itertools.combinations_with_replacement(range(heads), extra)
    ]
    table = np.array(ways, dtype=np.int64)
    return table[table.max(axis=1) <= ranks]


class _Search:
    """Branch and bound for the least load of the fullest rank: `best`, with the heads of each rank in `found`."""

    def __init__(self, places: int, best: int, found: list[list[int]]) -> None:
        self.places, self.best, self.found = places, best, found
        self.ranks = len(found)
        self.steps = 0

    def pack(self, pieces: list[tuple[int, int]], bound: int) -> None:
        """Place (size, head), largest first and a head's pieces side by side; stop at the bound."""
        self._place(pieces, 0, [0] * self.ranks, [[] for _ in range(self.ranks)], bound)

    def _place(
        self, pieces: list[tuple[int, int]], at: int, sums: list[int], held: list[list[int]], bound: int
    ) -> None:
        if at == len(pieces):
            self.best, self.found = max(sums), [list(members) for members in held]
            return
        size, head = pieces[at]
        seen = set()
        for rank in sorted(range(self.ranks), key=lambda r: (sums[r], len(held[r]), r)):
            state = (sums[rank], len(held[rank]))
            # Ranks that are equally full are interchangeable: pieces of other heads before this one are all placed.
            if state in seen or len(held[rank]) == self.places or head in held[rank]:
                continue
            if sums[rank] + size >= self.best or self.best <= bound or self.steps >= MOST_STEPS:
                return
            seen.add(state)
            self.steps += 1
            sums[rank] += size
            held[rank].append(head)
            self._place(pieces, at + 1, sums, held, bound)
            held[rank].pop()
            sums[rank] -= size

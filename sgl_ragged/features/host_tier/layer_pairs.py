"""Choose layers that share kept rows of a segment: Krul's Algorithm 1 for rows of a fixed size. Plain numpy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sgl_ragged.mem_pool.layout import SlabLayout

CANDIDATES = 0.75
"""Share of layers that are pair_candidates. Krul finds 75 % to 87.5 % of the layers of three models below its threshold
(Table 3), and does not give the threshold."""

ENDS = 0.1
"""Share of the tokens at either end that pair_candidates look at (Algorithm 1, lines 5 and 6)."""


def pair_candidates(attention: np.ndarray) -> np.ndarray:
    """Return the CANDIDATES layers that attend most to the first and last tenth of the tokens, bool [layers].

    Algorithm 1, lines 4 to 12, selects layers by a threshold. Then their number, and with it the size of rows, would
    vary, so layers are selected by rank here.

    Args:
        attention: float [layers, tokens], attention that each token receives; equal sums in all layers.
    """
    length = max(int(attention.shape[1] * ENDS), 1)
    at_ends = attention[:, :length].sum(axis=1) + attention[:, -length:].sum(axis=1)
    chosen = np.zeros(len(attention), dtype=bool)
    chosen[np.argsort(-at_ends, kind="stable")[: int(np.ceil(len(attention) * CANDIDATES))]] = True
    return chosen


def distances(attention: np.ndarray) -> np.ndarray:
    """Return Euclidean distances of attention [layers, tokens], float [layers, layers] (Algorithm 1, line 15)."""
    return np.linalg.norm(attention[:, None] - attention[None], axis=2)


def choose_pairs(apart: np.ndarray, chosen: np.ndarray, eligible: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return pairs (i, j), i < j, of layers that share (Algorithm 1, lines 18 to 30).

    Pairs are chosen by smallest distance, each layer in at most one pair; ties go to the lower layers. Pairs with a
    layer that is no candidate are chosen only if there are too few pairs of candidates.

    Args:
        apart: float [layers, layers], distances of the layers' attention.
        chosen: bool [layers], the pair_candidates.
        eligible: bool [layers, layers], upper triangle: pairs that may be chosen.
        count: pairs to choose; fewer are returned where there are no more.
    """
    pairs = np.argwhere(np.triu(eligible, 1))
    late = ~(chosen[pairs[:, 0]] & chosen[pairs[:, 1]])
    found: list[tuple[int, int]] = []
    taken: set[int] = set()
    # Distances are rounded so that ties are the same on every machine.
    for index in np.lexsort((pairs[:, 1], pairs[:, 0], apart[pairs[:, 0], pairs[:, 1]].round(9), late)):
        first, second = (int(layer) for layer in pairs[index])
        if len(found) == count:
            break
        if first not in taken and second not in taken:
            found.append((first, second))
            taken |= {first, second}
    return found


@dataclass(frozen=True, eq=False)
class Shareable:
    """Heads that pairs of layers of a layout can share, which are heads that store equally many elements."""

    layout: SlabLayout

    def heads(self, first: int, second: int) -> dict[int, int]:
        """Return the head of the first layer that each restored head of the second layer is restored from.

        Heads with equal counts of kept, total and first tokens are matched in their order; with equal budgets each head
        is matched with the head of the same number.
        """
        found: dict[int, int] = {}
        offered = {(band.kept, band.total, band.first): band.heads for band in self.layout.bands[first]}
        for band in self.layout.bands[second]:
            if band.kept:
                found.update(zip(band.heads, offered.get((band.kept, band.total, band.first), ()), strict=False))
        return found

    @cached_property
    def elems(self) -> np.ndarray:
        """Return the elements of the second layer that need not be stored, int64 [layers, layers], upper triangle."""
        layers = self.layout.num_layers
        saved = np.zeros((layers, layers), dtype=np.int64)
        for first, second in itertools.combinations(range(layers), 2):
            heads = list(self.heads(first, second))
            saved[first, second] = 2 * self.layout.head_dim * self.layout.kept[second, heads].sum()
        return saved

    @cached_property
    def promise(self) -> tuple[int, int]:
        """Return the number of shared pairs and the fewest elements that each saves, which every segment can meet.

        Only pairs that save at least this number of elements are eligible. A maximal matching has at least half the
        pairs of the largest one, so this number of pairs is found in every order of choice. The two numbers have the
        largest product. With equal budgets a pair saves a full layer, and a quarter of the layers is not stored; Krul's
        evaluation shares half of the layers (section 8).
        """
        best = (0, 0)
        for least in np.unique(self.elems[self.elems > 0]).tolist():
            number = -(-len(self._some_matching(self.elems >= least)) // 2)
            best = max(best, (number, least), key=lambda one: (one[0] * one[1], one[1]))
        return best

    def _some_matching(self, eligible: np.ndarray) -> list[tuple[int, int]]:
        """Return pairs of eligible layers, each layer in one pair at most, until no pair can be added."""
        found: list[tuple[int, int]] = []
        taken: set[int] = set()
        for first, second in np.argwhere(np.triu(eligible, 1)).tolist():
            if first not in taken and second not in taken:
                found.append((first, second))
                taken |= {first, second}
        return found

    @property
    def eligible(self) -> np.ndarray:
        """Return the pairs that save enough, bool [layers, layers], upper triangle."""
        return (self.elems > 0) & (self.elems >= self.promise[1])

"""All pairs of features in few servers, and which pairs a server refuses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence

Pair = tuple[str, str]

TRIES = 40
"""Sets that are grown at random for each that is taken."""


def pairs_of(names: Iterable[str]) -> set[Pair]:
    """Each two of them, in alphabetical order."""
    return set(itertools.combinations(sorted(names), 2))


def shown(names: Iterable[str], hides: Collection[str]) -> set[Pair]:
    """The pairs that a storm with these features says something about.

    Beside one that `hides`, it says something about that one alone, with each other.
    """
    pairs, hiding = pairs_of(names), set(names) & set(hides)
    return {pair for pair in pairs if set(pair) & hiding} if hiding else pairs


def cover(
    names: Sequence[str],
    refused: Collection[Pair],
    complete: Callable[[Sequence[str]], Sequence[str]],
    hides: Collection[str],
    most: int,
    covered: Collection[Pair] = (),
) -> list[tuple[str, ...]]:
    """Sets of features such that every pair that is not refused is `shown` by one of them; greedy and deterministic.

    Args:
        refused: pairs that no set may hold.
        complete: the features of a server that asks for these, with what comes by itself; () where there is none.
        hides: features beside which others are not seen.
        most: features in a set before it is completed.
        covered: pairs that need not occur.
    """
    bad, dice = set(refused), random.Random(0)
    left = pairs_of(names) - bad - set(covered)

    def served(made: Sequence[str]) -> bool:
        return bool(made) and not pairs_of(made) & bad

    def gain(row: Sequence[str]) -> int:
        return len(shown(row, hides) & left)

    def grown(seed: Pair) -> tuple[str, ...]:
        # What comes by itself is left out while the set grows: it would stand where others may.
        row, order = tuple(seed), dice.sample(names, len(names))
        if not served(complete(row)):
            return ()
        while len(row) < most:
            wider = [(*row, name) for name in order if name not in row]
            best = max((one for one in wider if served(complete(one))), key=gain, default=row)
            if gain(best) <= gain(row):
                break
            row = best
        return tuple(complete(row))

    rows: list[tuple[str, ...]] = []
    while left:
        seeds = sorted(left)
        row = max((grown(dice.choice(seeds)) for _ in range(TRIES)), key=gain)
        if not gain(row):
            # Nothing that goes with these alone.
            alone = [seed for seed in seeds if not gain(tuple(complete(seed)))]
            left.difference_update(alone)
            continue
        rows.append(row)
        left -= shown(row, hides)
    # What storms say about each other's features first, the rest behind.
    return sorted(rows, key=lambda row: bool(set(row) & set(hides)))


def narrow(names: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The features without which a storm that fails would not: each that can go, goes. `fails` runs one storm."""
    kept = list(names)
    for name in names:
        fewer = [one for one in kept if one != name]
        if fewer and fails(fewer):
            kept = fewer
    return tuple(kept)

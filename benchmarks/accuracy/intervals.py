"""95 % intervals of mean scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest

RESAMPLES, SEED = 10_000, 20_26
"""Of the bootstrap: the same scores give the same interval."""


def interval(sessions: Sequence[str], scores: Sequence[float]) -> tuple[float, float]:
    """Low and high end for the mean of `scores`, each of which belongs to the session beside it.

    Right-or-wrong scores: Wilson's interval, which takes questions for independent. Others: the percentiles of a
    bootstrap over sessions, since the questions of one session share its context and stand or fall together. Scores
    that are all the same give that value. One session alone says nothing of others: (0, 1).
    """
    if set(scores) <= {0.0, 1.0}:
        found = binomtest(round(sum(scores)), len(scores)).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    if len(set(scores)) == 1:
        return scores[0], scores[0]
    names, place = np.unique(np.array(sessions), return_inverse=True)
    if len(names) == 1:
        return 0.0, 1.0
    sums = np.bincount(place, weights=np.array(scores, dtype=np.float64))
    counts = np.bincount(place)
    # How often each session is drawn, in every resample.
    drawn = np.random.default_rng(SEED).multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    low, high = np.quantile((drawn @ sums) / (drawn @ counts), [0.025, 0.975])
    return float(low), float(high)


def of_mean(scores: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Low and high end for the mean of several tasks' scores, from the ends of each.

    Distances of the ends add as standard deviations do (MOVER: Zou and Donner, Statistics in Medicine 27, 2008, for
    the sum of independent estimates). Tasks that share their contexts are not independent: there it is too narrow.
    """
    value, low, high = np.array(scores), np.array(lows), np.array(highs)
    below, above = np.sqrt(np.sum((value - low) ** 2)), np.sqrt(np.sum((high - value) ** 2))
    return float(value.mean() - below / len(value)), float(value.mean() + above / len(value))

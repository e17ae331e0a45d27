"""How stable the shares of heads are over samples and tasks. Budgets that are fixed offline rely on this."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.stats import spearmanr

from sgl_ragged.profiles.profile import Profile

STEADY = 0.05
"""A head whose share deviates by less than this (standard deviation over samples) counts as steady."""


@dataclass(frozen=True)
class Stability:
    """Stability of head shares (TANGRAM section 3.2): does every input rank the heads alike?

    Rank correlations are Spearman's, over all heads of all layers; None where there is nothing to compare, or all
    heads are alike. `halves`: between the mean shares in even and in odd samples. `tasks_lowest`, `tasks_mean`: over
    all pairs of tasks, between their mean shares. `steady`: share of heads with sigma below `STEADY`.
    """

    samples: int
    tasks: tuple[str, ...]
    halves: float | None
    tasks_lowest: float | None
    tasks_mean: float | None
    steady: float


def measure_stability(profile: Profile) -> Stability | None:
    """Stability of a profile's shares; None if it holds no shares of single samples."""
    if profile.shares is None or len(profile.shares) == 0:
        return None
    shares = profile.shares
    tasks = tuple(sorted(set(profile.tasks)))
    # Whatever order the tasks come in, either half must have its share of each.
    turns = np.array([profile.tasks[:place].count(task) for place, task in enumerate(profile.tasks)])
    halves = None
    if turns.max() > 0:
        halves = rank_correlation(shares[turns % 2 == 0].mean(axis=0), shares[turns % 2 == 1].mean(axis=0))
    of_task = {task: shares[[name == task for name in profile.tasks]].mean(axis=0) for task in tasks}
    pairs = [rank_correlation(of_task[one], of_task[other]) for one, other in combinations(tasks, 2)]
    known = [pair for pair in pairs if pair is not None]
    return Stability(
        samples=len(shares),
        tasks=tasks,
        halves=halves,
        tasks_lowest=min(known, default=None),
        tasks_mean=float(np.mean(known)) if known else None,
        steady=float((profile.sigma < STEADY).mean()),
    )


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Spearman's rank correlation of two arrays of one shape; None if either is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(spearmanr(one.ravel(), other.ravel()).statistic)

"""Stability of the heads' shares over samples and tasks. Budgets that are fixed before serving rely on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.stats import spearmanr

from sgl_ragged.profiles.profile import Profile

STEADY = 0.05
"""Standard deviation over samples below which a head's share counts as steady."""


@dataclass(frozen=True)
class Stability:
    """Stability of head shares (TANGRAM section 3.2): how alike inputs rank the heads.

    Rank correlations are Spearman's, over all heads of all layers; None if there is nothing to compare, or all heads
    have equal shares.

    Args:
        samples: number of samples.
        halves: rank correlation between the mean shares in even and in odd samples.
        tasks_lowest, tasks_mean: rank correlations between the mean shares of tasks, over all pairs of tasks.
        steady: share of heads with sigma below STEADY.
    """

    samples: int
    tasks: tuple[str, ...]
    halves: float | None
    tasks_lowest: float | None
    tasks_mean: float | None
    steady: float


def measure_stability(profile: Profile) -> Stability | None:
    """Measure the stability of a profile's shares; None if it holds no shares of single samples."""
    if profile.shares is None or len(profile.shares) == 0:
        return None
    shares = profile.shares
    tasks = tuple(sorted(set(profile.tasks)))
    # Counting within each task gives both halves samples of every task, in any order of the tasks.
    counts = np.array([profile.tasks[:index].count(task) for index, task in enumerate(profile.tasks)])
    halves = None
    if counts.max() > 0:
        halves = rank_correlation(shares[counts % 2 == 0].mean(axis=0), shares[counts % 2 == 1].mean(axis=0))
    task_means = {task: shares[[name == task for name in profile.tasks]].mean(axis=0) for task in tasks}
    pairs = [rank_correlation(task_means[first], task_means[second]) for first, second in combinations(tasks, 2)]
    correlations = [pair for pair in pairs if pair is not None]
    return Stability(
        samples=len(shares),
        tasks=tasks,
        halves=halves,
        tasks_lowest=min(correlations, default=None),
        tasks_mean=float(np.mean(correlations)) if correlations else None,
        steady=float((profile.sigma < STEADY).mean()),
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Compute Spearman's rank correlation of two arrays of one shape; None if either is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(spearmanr(first.ravel(), second.ravel()).statistic)

"""What fitting makes of one head's segment, spelled out in float64 with numpy; shares no code with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LEAST, MOST = 0.05, 20.0
MASS_RIDGE, VALUE_RIDGE, BIAS_RIDGE = 1e-6, 1e-5, 1e-3
STEPS = 8


@dataclass(frozen=True)
class Book:
    """A head's codebook: queries [m, d] seen from a segment's end, masses [2, m], outputs [2, m, d], frequencies
    [d / 2] of rotated pairs (i, i + d / 2)."""

    queries: np.ndarray
    masses: np.ndarray
    outputs: np.ndarray
    frequencies: np.ndarray


def turned(rows: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    half = len(frequencies)
    pairs = (rows[..., :half] + 1j * rows[..., half : 2 * half]) * np.exp(1j * position * frequencies)
    return np.concatenate([pairs.real, pairs.imag, rows[..., 2 * half :]], axis=-1)


def weights(shares: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Bounded ridge regression by accelerated projected gradients, as many as are defined."""
    ridge = MASS_RIDGE * len(shares)
    hessian, linear = shares.T @ shares + ridge * np.eye(shares.shape[1]), shares.T @ wanted + ridge
    unit = np.sqrt(np.diag(hessian))
    hessian, linear = hessian / np.outer(unit, unit), linear / unit
    step = 1 / hessian.sum(axis=1).max()
    now = ahead = unit
    momentum = 1.0
    for _ in range(STEPS):
        after = np.clip(ahead - step * (hessian @ ahead - linear), LEAST * unit, MOST * unit)
        next_momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = after + (momentum - 1) / next_momentum * (after - now)
        now, momentum = after, next_momentum
    return now / unit


@dataclass(frozen=True)
class Fitted:
    """Kept rows of a segment: keys before they are rounded, values, and the matrices by which errors are fed back.

    asked: [d, d], second moments of queries. gram: [n, n], of the kept rows' weights; None if nothing was corrected.
    """

    keys: np.ndarray
    values: np.ndarray
    asked: np.ndarray
    gram: np.ndarray | None


def fitted(
    keys: np.ndarray,
    values: np.ndarray,
    kept: np.ndarray,
    number: int,
    book: Book,
    scale: float,
    stored: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda x, _: x,
    coded: bool = False,
) -> Fitted:
    """Correct what is kept of a segment [S, d], its number counted from 0.

    Args:
        stored: gives keys back as slabs do, with second moments of queries.
        coded: whether slabs have codes. Keys are rounded then with and without corrections, and errors of values are
            fed back in any case.
    """
    end = (number + 1) * len(keys) - 1
    queries = turned(book.queries * scale, end, book.frequencies)
    own = int(number == 0)
    rest, output = book.masses[own], book.outputs[own]
    logits = queries @ keys.T
    exps, others = np.exp(logits), np.exp(rest)
    mass, whole = exps.sum(1), exps.sum(1) + others
    true = (exps @ values + others[:, None] * output) / whole[:, None]
    w = weights(exps[:, kept] / whole[:, None], mass / whole)
    gram = queries.T @ queries + BIAS_RIDGE * len(queries) * np.eye(queries.shape[1])
    longer = keys[kept] + np.log(w)[:, None] * np.linalg.solve(gram, queries.sum(0))
    weighted = queries * (mass / whole)[:, None]
    asked = weighted.T @ weighted
    asked += 0.02 * np.diag(asked).mean() * np.eye(len(asked))
    in_slabs = stored(longer, asked)

    def outputs(some_keys: np.ndarray, some_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        powers = np.exp(queries @ some_keys.T)
        total = powers.sum(1) + others
        return powers / total[:, None], (powers @ some_values + others[:, None] * output) / total[:, None]

    shares, now = outputs(in_slabs, values[kept])
    normal = shares.T @ shares + VALUE_RIDGE * len(queries) * np.eye(len(kept))
    moved = values[kept] + np.linalg.solve(normal, shares.T @ (true - now))
    before = ((outputs(keys[kept], values[kept])[1] - true) ** 2).sum()
    if coded:
        before = max(before, ((now - true) ** 2).sum())
    after = ((outputs(in_slabs, moved)[1] - true) ** 2).sum()
    if after < before and np.abs(moved).max() <= 4 * np.abs(values[kept]).max():
        return Fitted(longer, moved, asked, normal)
    return Fitted(keys[kept], values[kept], asked, normal if coded else None)

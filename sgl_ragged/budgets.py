"""Budgets: how many tokens of each sealed segment every (layer, head) keeps.

Counts are multiples of UNIT tokens, at least the guard and at most the segment. The sum over the model meets
the ratio to within one unit, whatever the profile: what is promised to the sizing is what is stored.
"""

from __future__ import annotations

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profile import Profile

UNIT = 16
"""Tokens per storage unit: kept counts are multiples of it (16-row tiles in the kernels)."""

GUARD = 16
"""The last GUARD tokens of every segment are kept whatever their score."""

SINKS = 4
"""The first SINKS tokens of the sequence are kept whatever their score."""


def check_ratio(ratio: float) -> None:
    """Raise RaggedConfigError unless 0 < ratio <= 1."""
    if not 0.0 < ratio <= 1.0:
        raise RaggedConfigError(f"ratio {ratio} is outside (0, 1]: it is the share of the KV bytes to keep")


def check_segment(segment: int) -> None:
    """Raise RaggedConfigError unless the segment length is a positive multiple of UNIT."""
    if segment < 2 * UNIT or segment % UNIT:
        raise RaggedConfigError(f"segment length {segment} must be a multiple of {UNIT} and at least {2 * UNIT} tokens")


def uniform_kept(num_layers: int, num_heads: int, ratio: float, segment: int) -> np.ndarray:
    """Equal budgets for all heads: int64 [num_layers, num_heads] tokens per segment.

    Heads differ by at most one unit, spread evenly over layers and heads, so that the total meets the ratio.
    """
    return fit_kept(np.ones((num_layers, num_heads)), ratio, segment)


def profile_kept(profile: Profile, ratio: float, segment: int, alpha: float = 2.0) -> np.ndarray:
    """Budgets of a profile: int64 [num_layers, num_heads] tokens per segment.

    The weights are TANGRAM Eq. 5, mu + alpha * sigma, scaled by `fit_kept` until they meet the ratio.
    """
    weights = profile.mu.astype(np.float64) + alpha * profile.sigma.astype(np.float64)
    return fit_kept(weights, ratio, segment)


def fit_kept(weights: np.ndarray, ratio: float, segment: int) -> np.ndarray:
    """Scale weights by water-filling until the kept tokens meet the ratio.

    Args:
        weights: float [num_layers, num_heads], non-negative; only proportions matter.
        ratio: kept / full KV bytes, in (0, 1].
        segment: tokens per segment S.

    Returns:
        int64 [num_layers, num_heads]: n = min(S, UNIT * integer) with sum(n) within one unit of
        ratio * S * num_layers * num_heads, unless the guard of every head alone is more than that.
    """
    check_ratio(ratio)
    check_segment(segment)
    top = segment // UNIT
    flat = np.asarray(weights, dtype=np.float64).ravel()
    target_units = max(round(ratio * top * flat.size), flat.size)
    shares = _water_fill(np.maximum(flat, 1e-12), float(target_units), 1.0, float(top))
    return (_apportion(shares, target_units, top) * UNIT).reshape(weights.shape)


def _water_fill(weights: np.ndarray, total: float, low: float, high: float) -> np.ndarray:
    """clip(c * weights, low, high) with the c for which the sum is `total`, by bisection on log c."""
    log_low, log_high = np.log(low / weights.max()), np.log(high / weights.min())
    for _ in range(200):
        middle = (log_low + log_high) / 2
        if np.clip(np.exp(middle) * weights, low, high).sum() < total:
            log_low = middle
        else:
            log_high = middle
    return np.clip(np.exp(log_high) * weights, low, high)


def _apportion(shares: np.ndarray, total: int, top: int) -> np.ndarray:
    """Round shares to integers that sum to `total`: cumulative rounding, so equal shares spread evenly.

    A head's count is the difference of two rounded running sums, hence within one of its share.
    """
    running = np.concatenate([[0.0], np.cumsum(shares)])
    running *= total / running[-1]
    units = np.diff(np.floor(running + 0.5 + 1e-9)).astype(np.int64)
    return np.clip(units, 1, top)

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
    """Scale weights until the kept tokens meet the ratio.

    Every head gets clip(round(c * weight), 1, S / UNIT) units, with the c for which they sum to the target: Webster's
    divisor method with bounds. So budgets are proportional to weights between guard and segment, and no head ever
    loses a token when the ratio grows. Ties are spread evenly over layers and heads.

    Args:
        weights: float [num_layers, num_heads], non-negative; only proportions matter.
        ratio: kept / full KV bytes, in (0, 1].
        segment: tokens per segment S.

    Returns:
        int64 [num_layers, num_heads]: multiples of UNIT in [GUARD, S] with a sum within one unit of
        ratio * S * num_layers * num_heads, unless the guard of every head alone is more than that.
    """
    check_ratio(ratio)
    check_segment(segment)
    top = segment // UNIT
    flat = np.maximum(np.asarray(weights, dtype=np.float64).ravel(), 1e-12)
    heads = np.arange(flat.size)
    to_hand_out = max(round(ratio * top * flat.size) - flat.size, 0)
    # Scale at which each head gains its unit k = 2 .. top, the smallest first.
    gains = (np.arange(2, top + 1) - 0.5) / flat[:, None]
    # Any first m of the heads in the order of a golden-ratio sequence lie evenly among all of them.
    spread = np.argsort((heads * (5**0.5 - 1) / 2) % 1.0)
    place = np.empty_like(spread)
    place[spread] = heads
    order = np.lexsort((np.broadcast_to(place[:, None], gains.shape).ravel(), gains.ravel()))
    winners = order[:to_hand_out] // (top - 1)
    units = 1 + np.bincount(winners, minlength=flat.size)
    return (units * UNIT).reshape(weights.shape)

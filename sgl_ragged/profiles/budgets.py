"""Budgets: how many tokens of each sealed segment every (layer, head) keeps.

Counts are multiples of UNIT tokens, at least the guard and at most the segment. Their sum meets the ratio to within one
unit, in every layer or over the model, for any profile. So the pool's sizes follow from the ratio alone.
"""

from __future__ import annotations

import math

import numpy as np

from sgl_ragged.errors import RaggedConfigError

UNIT = 16
"""Tokens per storage unit: kept counts are multiples of it (16-row tiles in the kernels)."""

GUARD = 16
"""The last GUARD tokens of every segment are always kept."""

SINKS = 4
"""The first SINKS tokens of the sequence are always kept."""


def check_ratio(ratio: float) -> None:
    """Raise RaggedConfigError unless 0 < ratio <= 1."""
    if not 0.0 < ratio <= 1.0:
        raise RaggedConfigError(f"ratio {ratio} is outside (0, 1]: it is the share of the KV bytes to keep")


def check_segment(segment: int) -> None:
    """Raise RaggedConfigError unless the segment length is a positive multiple of UNIT."""
    if segment < 2 * UNIT or segment % UNIT:
        raise RaggedConfigError(f"segment length {segment} must be a multiple of {UNIT} and at least {2 * UNIT} tokens")


def check_budgets(ratio: float, segment: int, guard_bytes: float = 1.0) -> None:
    """Raise RaggedConfigError if the guards of all heads alone take more than the ratio.

    Args:
        ratio: kept / full KV bytes.
        guard_bytes: bytes of a guard in a slab / bytes of the same tokens in an uncompressed cache.
    """
    check_ratio(ratio)
    check_segment(segment)
    least_ratio = GUARD / segment * guard_bytes
    if ratio < least_ratio:
        enough = 2 ** math.ceil(math.log2(GUARD * guard_bytes) - math.log2(ratio))
        raise RaggedConfigError(
            f"ratio {ratio} cannot be met with segments of {segment} tokens: every head keeps at least {GUARD} of "
            f"them, a ratio of {math.ceil(least_ratio * 1e4) / 1e4:g}; use that ratio, or segments of {enough} tokens"
        )


def uniform_kept(num_layers: int, num_heads: int, ratio: float, segment: int) -> np.ndarray:
    """Give all heads equal budgets: int64 [num_layers, num_heads] tokens per segment.

    Heads differ by at most one unit, spread evenly over layers and heads, so that the total meets the ratio.
    """
    return fit_kept(np.ones((num_layers, num_heads)), ratio, segment)


def fit_kept(weights: np.ndarray, ratio: float, segment: int, scope: str = "model") -> np.ndarray:
    """Scale weights until the kept tokens meet the ratio.

    Every head gets clip(round(c * weight), 1, S / UNIT) units, with the c for which they sum to the target: Webster's
    divisor method with bounds. So budgets are proportional to weights between guard and segment, and no head loses a
    token when the ratio grows. Ties are spread evenly over layers and heads.

    Args:
        weights: float [num_layers, num_heads], non-negative; only proportions matter.
        ratio: kept / full KV bytes, in (0, 1].
        segment: tokens per segment S.
        scope: "model" meets the ratio over the model, "layer" in every layer.

    Returns:
        int64 [num_layers, num_heads]: multiples of UNIT in [GUARD, S]. The sum is within one unit of ratio * S * heads,
        in each scope and over the model, unless the guards alone are more than that.
    """
    check_segment(segment)
    num_units = segment // UNIT
    weights = np.maximum(np.asarray(weights, dtype=np.float64), 1e-12)
    # Scale at which each head gains its unit k = 2 .. num_units: the smallest first.
    return _distribute(-(np.arange(2, num_units + 1) - 0.5) / weights[..., None], ratio, segment, scope)


def coverage_kept(coverage: np.ndarray, ratio: float, segment: int, scope: str = "model") -> np.ndarray:
    """Give tokens to the heads whose coverage curves are steepest, until the ratio is spent.

    Curves are replaced by their smallest concave majorants first: then taking the steepest step is always optimal for
    the total coverage, and no head loses a token when the ratio grows.

    Args:
        coverage: float [num_layers, num_heads, units], attention that a head's best 16, 32, .. tokens of a segment
            cover. Curves of another segment length are read at the same share of the segment.
        ratio, segment, scope: as in `fit_kept`.

    Returns:
        int64 [num_layers, num_heads], as `fit_kept` returns.
    """
    check_segment(segment)
    num_units, num_points = segment // UNIT, coverage.shape[2]
    shares = np.arange(1, num_units + 1) / num_units
    flat = coverage.reshape(-1, num_points).astype(np.float64)
    known_shares = np.arange(0, num_points + 1) / num_points
    curves = np.stack([np.interp(shares, known_shares, np.concatenate([[0.0], curve])) for curve in flat])
    gains = np.stack([_never_rising(np.diff(curve)) for curve in curves])
    return _distribute(gains.reshape(*coverage.shape[:2], num_units - 1), ratio, segment, scope)


def _never_rising(values: np.ndarray) -> np.ndarray:
    """Return the never rising float64 [n] nearest to `values` in least squares: neighbours that rise are averaged.

    Applied to the differences of a curve, this gives the differences of its smallest concave majorant.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] < mean:
            mean, count = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count), counts[-1] + count
            del means[-1], counts[-1]
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)


def _distribute(gains: np.ndarray, ratio: float, segment: int, scope: str) -> np.ndarray:
    """Give every head one unit, then distribute the units of greatest gain until the target is met.

    Args:
        gains: float [num_layers, num_heads, S / UNIT - 1], gain of the 2nd, 3rd, .. unit of each head; never rising.
    """
    check_ratio(ratio)
    if scope == "layer":
        layers = zip(gains, _layer_units(gains.shape[0], gains.shape[1], ratio, segment), strict=True)
        return np.concatenate([_distribute_units(row[None], num_units) for row, num_units in layers])
    return _distribute_units(gains, round(ratio * (segment // UNIT) * gains.shape[0] * gains.shape[1]))


def _layer_units(num_layers: int, num_heads: int, ratio: float, segment: int) -> list[int]:
    """Return the number of units in each layer: the two integers around the mean, mixed so that the model meets the
    ratio, too.

    Layers round up one after the other as the mean's fraction grows, so no layer loses a unit when the ratio grows.
    """
    mean = round(ratio * (segment // UNIT) * num_heads, 9)
    fraction = mean - int(mean)
    return [int(mean) + bool(fraction > (rank + 0.5) / num_layers) for rank in _even_order(num_layers)]


def _distribute_units(gains: np.ndarray, num_units: int) -> np.ndarray:
    """Distribute units among the heads of `gains`: int64 [num_layers, num_heads] tokens per head."""
    num_heads = gains.shape[0] * gains.shape[1]
    flat = gains.reshape(num_heads, -1)
    unit = np.broadcast_to(np.arange(flat.shape[1]), flat.shape)
    tie_rank = np.broadcast_to(_even_order(num_heads)[:, None], flat.shape)
    order = np.lexsort((tie_rank.ravel(), unit.ravel(), -flat.ravel()))
    winners = order[: max(num_units - num_heads, 0)] // flat.shape[1]
    kept = 1 + np.bincount(winners, minlength=num_heads)
    return (kept * UNIT).reshape(gains.shape[:2])


def _even_order(count: int) -> np.ndarray:
    """Rank `count` items in a row so that, for any m, the items with ranks below m are spread evenly among all."""
    order = np.argsort((np.arange(count) * (5**0.5 - 1) / 2) % 1.0)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(count)
    return ranks

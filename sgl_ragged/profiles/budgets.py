"""Budgets: how many tokens of each sealed segment every (layer, head) keeps.

Counts are multiples of UNIT tokens, at least the guard and at most the segment. With `fit="exact"` their sum meets
the ratio to within one unit, in every layer or over the model, whatever the profile: what is promised to the sizing
is what is stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.head_statistics import KEPT_WHOLE, ROLE, ROLES, STABILITY

if TYPE_CHECKING:
    from sgl_ragged.profiles.profile import Profile

UNIT = 16
"""Tokens per storage unit: kept counts are multiples of it (16-row tiles in the kernels)."""

GUARD = 16
"""The last GUARD tokens of every segment are kept whatever their score."""

SINKS = 4
"""The first SINKS tokens of the sequence are kept whatever their score."""

LEAST_STABILITY = 1 / 64
"""Stability that heads of none are counted with: one token of the sets of 64 that calibration compares."""


def check_ratio(ratio: float) -> None:
    """Raise RaggedConfigError unless 0 < ratio <= 1."""
    if not 0.0 < ratio <= 1.0:
        raise RaggedConfigError(f"ratio {ratio} is outside (0, 1]: it is the share of the KV bytes to keep")


def check_segment(segment: int) -> None:
    """Raise RaggedConfigError unless the segment length is a positive multiple of UNIT."""
    if segment < 2 * UNIT or segment % UNIT:
        raise RaggedConfigError(f"segment length {segment} must be a multiple of {UNIT} and at least {2 * UNIT} tokens")


def check_budgets(ratio: float, segment: int, guard_bytes: float = 1.0) -> None:
    """Raise RaggedConfigError unless heads can keep this share of segments of this length: each keeps its guard.

    Args:
        ratio: kept / full KV bytes.
        guard_bytes: of a head that keeps nothing else / of these tokens in an uncompressed cache.
    """
    check_ratio(ratio)
    check_segment(segment)
    least = GUARD / segment * guard_bytes
    if ratio < least:
        enough = 2 ** math.ceil(math.log2(GUARD * guard_bytes) - math.log2(ratio))
        raise RaggedConfigError(
            f"ratio {ratio} cannot be met with segments of {segment} tokens: every head keeps {GUARD} of them or more, "
            f"a ratio of {math.ceil(least * 1e4) / 1e4:g}; ask for that, or for segments of {enough} tokens"
        )


def uniform_kept(num_layers: int, num_heads: int, ratio: float, segment: int) -> np.ndarray:
    """Equal budgets for all heads: int64 [num_layers, num_heads] tokens per segment.

    Heads differ by at most one unit, spread evenly over layers and heads, so that the total meets the ratio.
    """
    return fit_kept(np.ones((num_layers, num_heads)), ratio, segment)


def profile_kept(profile: Profile, ratio: float, segment: int) -> np.ndarray:
    """Budgets of a profile: int64 [num_layers, num_heads] tokens per segment.

    Method `coverage` hands out units to the steepest curves. Method `implied` takes mu + alpha * sigma (TANGRAM Eq. 5)
    as weights and scales them to the ratio, or, with `fit="paper"`, applies Eq. 5 as written. Method `roles`: see
    `roles_kept`.

    Raises:
        RaggedConfigError: `fit="paper"` and a ratio other than the profile's, for which Eq. 5 has no answer, or a
            ratio that the heads of method `roles` that are kept whole exceed.
    """
    if profile.coverage is not None:
        return coverage_kept(profile.coverage, ratio, segment, profile.scope)
    if profile.method == "roles":
        return roles_kept(profile.statistics[ROLE], profile.statistics[STABILITY], ratio, segment)
    weights = profile.mu.astype(np.float64) + profile.alpha * profile.sigma.astype(np.float64)
    if profile.fit == "exact":
        return fit_kept(weights, ratio, segment, profile.scope)
    if not np.isclose(ratio, profile.ratio):
        raise RaggedConfigError(
            f"the profile applies Eq. 5 as written (fit=paper), so it serves {profile.ratio:g} of the tokens, for "
            f"which it was calibrated, not {ratio:.4g}: serve it with --ragged-slab-dtype wide --ragged-ratio "
            f"{profile.ratio:g}, or calibrate with --fit exact"
        )
    check_segment(segment)
    # Rounded first: shares come in float32, and a hair above a whole unit is not another unit.
    units = np.ceil(np.round(np.minimum(weights, 1.0) * segment / UNIT, 4)).astype(np.int64)
    return np.clip(units * UNIT, GUARD, segment)


def fit_kept(weights: np.ndarray, ratio: float, segment: int, scope: str = "model") -> np.ndarray:
    """Scale weights until the kept tokens meet the ratio.

    Every head gets clip(round(c * weight), 1, S / UNIT) units, with the c for which they sum to the target: Webster's
    divisor method with bounds. So budgets are proportional to weights between guard and segment, and no head ever
    loses a token when the ratio grows. Ties are spread evenly over layers and heads.

    Args:
        weights: float [num_layers, num_heads], non-negative; only proportions matter.
        ratio: kept / full KV bytes, in (0, 1].
        segment: tokens per segment S.
        scope: "model" meets the ratio over the model, "layer" in every layer.

    Returns:
        int64 [num_layers, num_heads]: multiples of UNIT in [GUARD, S]; per scope, the sum is within one unit of
        ratio * S * heads, of all layers together within one unit, too, unless the guards alone are more than that.
    """
    check_segment(segment)
    top = segment // UNIT
    weights = np.maximum(np.asarray(weights, dtype=np.float64), 1e-12)
    # Scale at which each head gains its unit k = 2 .. top: the smallest first.
    return _hand_out(-(np.arange(2, top + 1) - 0.5) / weights[..., None], ratio, segment, scope)


def coverage_kept(coverage: np.ndarray, ratio: float, segment: int, scope: str = "model") -> np.ndarray:
    """Hand out tokens to the heads whose coverage curves are steepest, until the ratio is spent.

    Curves are replaced by their smallest concave majorants first: then always taking the steepest is optimal for the
    total coverage, and no head ever loses a token when the ratio grows.

    Args:
        coverage: float [num_layers, num_heads, units]: what a head's best 16, 32, .. tokens of a segment cover.
            Curves of another segment length are read at the same share of the segment.
        ratio, segment, scope: as in `fit_kept`, also for the returned array.
    """
    check_segment(segment)
    top, measured = segment // UNIT, coverage.shape[2]
    shares = np.arange(1, top + 1) / top
    flat = coverage.reshape(-1, measured).astype(np.float64)
    known = np.arange(0, measured + 1) / measured
    curves = np.stack([np.interp(shares, known, np.concatenate([[0.0], curve])) for curve in flat])
    gains = np.stack([_never_rising(np.diff(curve)) for curve in curves])
    return _hand_out(gains.reshape(*coverage.shape[:2], top - 1), ratio, segment, scope)


def roles_kept(role: np.ndarray, stability: np.ndarray, ratio: float, segment: int) -> np.ndarray:
    """Everything for volatile heads and pivots, the rest in inverse proportion to stability: HeteroCache Eq. 7 and 8.

    Eq. 8 is rounded to units and bounded by guard and segment as in `fit_kept`, over the model.

    Args:
        role: [num_layers, num_heads], places in `head_statistics.ROLES`.
        stability: float [num_layers, num_heads], in [0, 1].
        ratio, segment: as in `fit_kept`, also for the returned array.

    Raises:
        RaggedConfigError: the ratio is less than `least_ratio`: rho * N < N_full in Eq. 7, guards included.
    """
    check_ratio(ratio)
    check_segment(segment)
    whole = kept_whole(role)
    least = least_ratio(role, segment)
    if ratio < least:
        raise RaggedConfigError(
            f"ratio {ratio} is too small for the profile's roles: {whole.sum()} of {whole.size} heads are pivots or "
            f"volatile and keep everything, which takes a ratio of {np.ceil(1000 * least) / 1000:g} or more; calibrate "
            f"with a lower --tau-stable for fewer of them"
        )
    weights = 1.0 / np.maximum(stability.astype(np.float64), LEAST_STABILITY)
    # Beyond all others: they are filled to the segment before anybody else has a second unit.
    return fit_kept(np.where(whole, segment / LEAST_STABILITY * 1e3, weights), ratio, segment)


def kept_whole(role: np.ndarray) -> np.ndarray:
    """bool [num_layers, num_heads]: heads that keep everything, of `role` as in `roles_kept`."""
    return np.isin(role, [ROLES.index(name) for name in KEPT_WHOLE])


def least_ratio(role: np.ndarray, segment: int) -> float:
    """The smallest ratio at which `roles_kept` has an answer: all others keep their guard."""
    return float(np.where(kept_whole(role), segment, GUARD).mean() / segment)


def _never_rising(values: np.ndarray) -> np.ndarray:
    """The never rising float64 [n] nearest to `values` in least squares: neighbours that rise are averaged.

    Of a curve's differences it gives those of the curve's smallest concave majorant.
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


def _hand_out(gains: np.ndarray, ratio: float, segment: int, scope: str) -> np.ndarray:
    """One unit for every head, then the units of greatest gain until the target is met.

    Args:
        gains: float [num_layers, num_heads, S / UNIT - 1], what unit 2, 3, .. of each head brings; never rising.
    """
    check_ratio(ratio)
    if scope == "layer":
        layers = zip(gains, _layer_units(gains.shape[0], gains.shape[1], ratio, segment), strict=True)
        return np.concatenate([_give(row[None], units) for row, units in layers])
    return _give(gains, round(ratio * (segment // UNIT) * gains.shape[0] * gains.shape[1]))


def _layer_units(num_layers: int, num_heads: int, ratio: float, segment: int) -> list[int]:
    """Units of each layer, the two integers around its share, mixed so that the model meets the ratio, too.

    Layers round up one after the other as the share's fraction grows, so none loses a unit when the ratio does.
    """
    share = round(ratio * (segment // UNIT) * num_heads, 9)
    fraction = share - int(share)
    return [int(share) + bool(fraction > (place + 0.5) / num_layers) for place in _spread(num_layers)]


def _give(gains: np.ndarray, units: int) -> np.ndarray:
    """Tokens per head, int64 [num_layers, num_heads], when the heads of `gains` share this many units."""
    heads = gains.shape[0] * gains.shape[1]
    flat = gains.reshape(heads, -1)
    number = np.broadcast_to(np.arange(flat.shape[1]), flat.shape)
    place = np.broadcast_to(_spread(heads)[:, None], flat.shape)
    order = np.lexsort((place.ravel(), number.ravel(), -flat.ravel()))
    winners = order[: max(units - heads, 0)] // flat.shape[1]
    kept = 1 + np.bincount(winners, minlength=heads)
    return (kept * UNIT).reshape(gains.shape[:2])


def _spread(count: int) -> np.ndarray:
    """A place for each of `count` things in a row: those with the first m places lie evenly among all of them."""
    order = np.argsort((np.arange(count) * (5**0.5 - 1) / 2) % 1.0)
    places = np.empty_like(order)
    places[order] = np.arange(count)
    return places

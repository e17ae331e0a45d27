"""What must hold of a profile's numbers and tensors, whoever wrote it: a digest says only that it was not damaged.

Each check yields reasons; the first one refuses the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import UNIT, check_ratio, check_segment
from sgl_ragged.profiles.codebook import codebook_faults
from sgl_ragged.profiles.head_statistics import (
    DROPPED,
    OVERLAP,
    PIVOT_ORDER,
    PIVOTS,
    ROLE,
    ROLES,
    SIMILARITY,
    STABILITY,
    WATCHED,
)

if TYPE_CHECKING:
    from sgl_ragged.profiles.profile import Profile

METHODS = ("implied", "coverage", "roles")
SCOPES = ("layer", "model")
FITS = ("exact", "paper")
QUERIES = ("", "all", "answers")

HELD_OUT = ("loss, trained on", "loss, held out", "coverage", "coverage of keydiff", "best coverage")
"""Columns of `Profile.held_out`: the training's error in variances of its target, and the share of peak attention that
the best `ratio` of each segment's tokens cover on held-out samples, by the scorer, by keydiff, at best."""

VALUE_MEAN = "value_mean"
"""The statistic that profiles of every scorer have: the mean value of each head, float32 [L, H, head_dim]."""

MOST_ALPHA = 100.0
"""Far beyond any safety margin, in standard deviations; with much larger ones sums of floats would be infinite."""

_ROUNDING = 1e-4
"""By which means of float32 shares and attention may be off."""

_LONGEST_NAME = 1000
_TEXTS = ("model_id", "model_fingerprint", "scorer", "queries", "dataset_hash", "provenance", "license")


def check_profile(profile: Profile) -> None:
    """Raise RaggedConfigError with the first thing that cannot be, in one line."""
    for check in (_metadata, _shares, _coverage, _samples, _statistics):
        for reason in check(profile):
            raise RaggedConfigError(f"profile: {reason}")


def _metadata(profile: Profile) -> Iterator[str]:
    for name, known in (("method", METHODS), ("scope", SCOPES), ("fit", FITS), ("queries", QUERIES)):
        value = getattr(profile, name)
        if value not in known:
            yield f"unknown {name} {value!r}; known: {', '.join(filter(None, known))}"
    for name in _TEXTS:
        yield from _text(name, getattr(profile, name))
    for task in profile.tasks:
        yield from _text("tasks", task)
    # 0 is what `calib convert` knows of a model whose config it was not given; no model has it.
    for name, least in (("head_dim", 0), ("samples", 1)):
        if getattr(profile, name) < least:
            yield f"{name} {getattr(profile, name)} must be at least {least}"
    # NaN is not in the interval either.
    if not 0.0 <= profile.alpha <= MOST_ALPHA:
        yield f"alpha {profile.alpha} is outside [0, {MOST_ALPHA:g}]"
    checks: tuple[tuple[Callable[[Any], None], Any], ...] = (
        (check_ratio, profile.ratio),
        (check_segment, profile.segment),
    )
    for check, value in checks:
        try:
            check(value)
        except RaggedConfigError as error:
            yield str(error)


def _text(name: str, value: object) -> Iterator[str]:
    """Names end up in the log and in one-line refusals."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST_NAME:
        yield f"{name} must be a line of at most {_LONGEST_NAME} printable characters"


def _shares(profile: Profile) -> Iterator[str]:
    mu, sigma = profile.mu, profile.sigma
    if mu.ndim != 2 or mu.shape != sigma.shape or not mu.size:
        yield f"mu {mu.shape} and sigma {sigma.shape} must be [layers, heads]"
    for name, array in (("mu", mu), ("sigma", sigma)):
        yield from _within(name, array, 0.0, 1.0, "it is a share of a segment")
    if not mu.any():
        yield "mu is 0 everywhere: it says of no head that it needs anything"


def _coverage(profile: Profile) -> Iterator[str]:
    coverage = profile.coverage
    if (coverage is not None) != (profile.method == "coverage"):
        yield f"method {profile.method!r} and coverage curves do not go together"
    if coverage is None:
        return
    units = profile.segment // UNIT
    if coverage.shape != (*profile.mu.shape, units):
        yield (
            f"coverage {coverage.shape} must be [{profile.num_layers} layers, {profile.num_heads} heads, {units} units "
            f"of a segment of {profile.segment}]"
        )
    yield from _within("coverage", coverage, 0.0, float(profile.segment), "it is a sum of attention to its tokens")
    if (np.diff(coverage, axis=-1) < -_ROUNDING * coverage.max(axis=-1, keepdims=True)).any():
        yield "coverage has curves that fall: more tokens cannot cover less"
    if not coverage.any():
        yield "coverage is 0 everywhere: it says of no head that it needs anything"


def _samples(profile: Profile) -> Iterator[str]:
    shares, held_out = profile.shares, profile.held_out
    if shares is not None:
        if shares.shape != (len(profile.tasks), *profile.mu.shape):
            yield f"shares {shares.shape} do not fit {len(profile.tasks)} tasks"
        yield from _within("shares", shares, 0.0, 1.0, "they are shares of a segment")
    if held_out is not None:
        if held_out.shape != (profile.num_layers, len(HELD_OUT)):
            yield f"held_out {held_out.shape} must be [layers, {len(HELD_OUT)}]"
        yield from _within("held_out", held_out, 0.0, np.inf, "it has losses and shares")


def _statistics(profile: Profile) -> Iterator[str]:
    statistics = profile.statistics
    if profile.method == "roles" and not {STABILITY, ROLE} <= set(statistics):
        yield f"method 'roles' needs the statistics {STABILITY} and {ROLE}"
    for name, array in statistics.items():
        if array.shape[:2] not in (profile.mu.shape, (profile.num_layers, 1)) or 0 in array.shape:
            yield f"statistic {name} {array.shape} must be [layers, heads or 1, ...]"
        yield from _within(f"statistic {name}", array, -np.inf, np.inf, "")
    shape = profile.mu.shape
    # Dimensions of the heads' own statistics behind [layers, heads], and their range.
    for name, more, low, high in (
        (VALUE_MEAN, (profile.head_dim,), -np.inf, np.inf),
        (STABILITY, (), 0.0, 1.0),
        (SIMILARITY, (), 0.0, 1.0),
        (OVERLAP, (profile.num_heads,), 0.0, 1.0),
        (ROLE, (), 0.0, len(ROLES) - 1.0),
        (PIVOT_ORDER, (), -1.0, PIVOTS - 1.0),
        (DROPPED, (), 0.0, np.inf),
    ):
        if name in statistics:
            if statistics[name].shape != (*shape, *more):
                yield f"statistic {name} {statistics[name].shape} must be {[*shape, *more]}"
            yield from _within(f"statistic {name}", statistics[name], low, high, "")
    yield from _pivots(statistics, shape)
    yield from codebook_faults(statistics, shape, profile.head_dim)


def _pivots(statistics: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Iterator[str]:
    for name in (ROLE, PIVOT_ORDER):
        if name in statistics and (statistics[name] != np.round(statistics[name])).any():
            yield f"statistic {name} must be whole numbers"
    if PIVOT_ORDER not in statistics:
        return
    places = np.sort(statistics[PIVOT_ORDER][statistics[PIVOT_ORDER] >= 0])
    if (places != np.arange(len(places))).any():
        yield f"statistic {PIVOT_ORDER} must number the pivots 0, 1, .., each once"
    if WATCHED in statistics:
        watched = statistics[WATCHED]
        if watched.ndim != 3 or watched.shape[:2] != shape or watched.shape[2] < len(places):
            yield f"statistic {WATCHED} {watched.shape} must be {[*shape, 'pivots']}, and there are {len(places)}"
        yield from _within(f"statistic {WATCHED}", watched, 0.0, 1.0, "it is a share of attention")


def _within(name: str, array: np.ndarray, low: float, high: float, why: str) -> Iterator[str]:
    """Finite as float32, in which it is used, and in the interval."""
    with np.errstate(over="ignore"):
        stored = array.astype(np.float32)
    if not np.isfinite(stored).all():
        yield f"{name} has non-finite entries"
    elif (stored < low - _ROUNDING * (low != 0)).any() or (stored > high + _ROUNDING).any():
        yield f"{name} has entries outside [{low:g}, {high:g}]" + (f"; {why}" if why else "")

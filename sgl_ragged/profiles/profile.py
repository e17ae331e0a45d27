"""Profiles: calibrated statistics of one model and one scorer, stored as one safetensors file.

A file holds JSON metadata and tensors, no code. The metadata has a format version, the fingerprint of the model's
attention geometry and a digest of the contents; a file that does not match any of them is refused. docs/calibration.md
lists tensors and metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import UNIT, check_ratio, check_segment, coverage_kept, fit_kept
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.head_statistics import ROUNDING, range_faults, statistic_faults
from sgl_ragged.profiles.head_statistics import VALUE_MEAN as VALUE_MEAN
from sgl_ragged.profiles.quality import MeasuredQuality, from_json, quality_faults, to_json
from sgl_ragged.profiles.reference import ReferenceText, from_tensors, reference_faults, to_tensors

FORMAT = "sgl_ragged.profile"
FORMAT_VERSION = 3

FIT = "exact"
"""Metadata `fit` of every profile: budgets are scaled to the ratio that is served."""

STATISTIC = "statistic."
"""Prefix of statistics among the file's tensors."""

METHODS = ("implied", "coverage")
"""How budgets follow from a profile (`profile_kept`): `implied` from mu and sigma, as in the profiles that `calib
convert` makes, `coverage` from curves, as in those that `calib run` makes."""

SCOPES = ("layer", "model")
QUERIES = ("", "all", "answers")

HELD_OUT = ("loss, trained on", "loss, held out", "coverage", "coverage of keydiff", "best coverage")
"""Columns of `Profile.held_out`: the error on training and on held-out samples, in variances of the target; then the
share of peak attention on held-out samples that the best `ratio` of each segment's tokens receive when ranked by the
scorer, by keydiff, and by that attention itself."""

MAX_ALPHA = 100.0
"""Largest accepted safety margin, in standard deviations. Far larger ones would make sums of floats infinite."""

_MAX_TEXT_LENGTH = 1000
_TEXTS = ("model_id", "model_fingerprint", "scorer", "queries", "dataset_hash", "provenance", "license")


@dataclass(frozen=True)
class Profile:
    """Calibrated statistics of one model's heads with one scorer; L layers, H heads, N samples, S tokens per segment.

    Arrays are float32, but for statistics in float16 and tokens in int32.

    Args:
        mu, sigma: [L, H], share of a segment that each head needs, mean and standard deviation (TANGRAM Eq. 5).
        ratio: kept share of all tokens at which mu was measured.
        scope: whether the ratio holds in each layer or over the model.
        alpha: safety margin for method `implied`, in standard deviations.
        coverage: [L, H, S / 16], mean peak attention of later queries that the head's best 16, 32, .. S tokens of a
            segment receive, with steps weighed by output errors where these were measured (`calib.output_error`).
            Method `coverage` only.
        queries: queries whose attention `coverage` counts, "all" or "answers".
        shares: [N, L, H], share of a segment that each head needs in each sample; `tasks`: the samples' tasks.
        held_out: [L, 5], quality of a trained scorer on held-out samples, in the columns HELD_OUT.
        statistics: arrays [L, H, ...] by name, [L, 1, ...] where the heads of a layer share them: what the scorer needs
            at run time, and statistics that every profile has (`head_statistics`, `codebook`).
        reference: predictions of the uncompressed model for held-out texts (`reference`); empty if none were recorded.
        quality: distances of servers with this profile from the reference, by ratio (`quality`), highest ratio first.

    Raises:
        RaggedConfigError: a number or array is outside of what calibration can measure. A digest shows only that a file
            was not damaged.
    """

    mu: np.ndarray
    sigma: np.ndarray
    model_id: str
    model_fingerprint: str
    head_dim: int
    scorer: str
    method: str
    scope: str
    ratio: float
    segment: int
    samples: int
    alpha: float = 2.0
    queries: str = ""
    dataset_hash: str = ""
    provenance: str = ""
    license: str = ""
    tasks: tuple[str, ...] = ()
    coverage: np.ndarray | None = None
    shares: np.ndarray | None = None
    held_out: np.ndarray | None = None
    statistics: MappingProxyType[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    reference: tuple[ReferenceText, ...] = ()
    quality: tuple[MeasuredQuality, ...] = ()

    def __post_init__(self) -> None:
        for check in (
            _metadata_faults,
            _share_faults,
            _coverage_faults,
            _sample_faults,
            _statistic_faults,
            _reference_faults,
            _quality_faults,
        ):
            # Later checks assume that earlier ones passed, so the first reason is raised.
            for reason in check(self):
                raise RaggedConfigError(f"profile: {reason}")

    @property
    def num_layers(self) -> int:
        return int(self.mu.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.mu.shape[1])

    def digest(self) -> str:
        """Return 16 hex digits over tensors and metadata; profiles with equal digests give equal budgets and scores."""
        state = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, array in sorted(self._tensors().items()):
            state.update(json.dumps([name, array.shape]).encode())
            state.update(array.tobytes())
        return state.hexdigest()[:16]

    def _tensors(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in ("mu", "sigma", "coverage", "shares", "held_out")}
        arrays |= {STATISTIC + name: array for name, array in self.statistics.items()} | to_tensors(self.reference)
        return {
            name: np.ascontiguousarray(array, dtype=array.dtype if array.dtype in _STORED else np.float32)
            for name, array in arrays.items()
            if array is not None
        }

    def _metadata(self) -> dict[str, str]:
        values = {name: getattr(self, name) for name in _METADATA}
        texts = {name: json.dumps(value) if name == "tasks" else str(value) for name, value in values.items()}
        measured = {"quality": to_json(self.quality)} if self.quality else {}
        return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "fit": FIT} | texts | measured

    def save(self, path: str | Path) -> None:
        """Write the profile to `path`, replacing a file that exists."""
        Path(path).write_bytes(save(self._tensors(), metadata=self._metadata() | {"digest": self.digest()}))

    def require_model(self, geometry: ModelGeometry) -> None:
        """Raise RaggedConfigError unless the profile was made for this model."""
        have = (self.num_layers, self.num_heads, self.head_dim)
        want = (geometry.num_layers, geometry.num_heads, geometry.head_dim)
        if have != want:
            raise RaggedConfigError(
                f"the profile was calibrated for {self.model_id!r} with (layers, heads, head_dim) = {have}, "
                f"but {geometry.name!r} has {want}: pass a profile of this model or none"
            )
        if self.model_fingerprint != geometry.fingerprint:
            raise RaggedConfigError(
                f"the profile was calibrated for {self.model_id!r} (fingerprint {self.model_fingerprint}), "
                f"but {geometry.name!r} has fingerprint {geometry.fingerprint}: pass a profile of this model or none"
            )


_STORED = (np.dtype(np.float16), np.dtype(np.int32))
"""Dtypes that a file keeps; all others are stored as float32."""

_ARRAYS = ("mu", "sigma", "coverage", "shares", "held_out", "statistics", "reference", "quality")
_METADATA = {f.name: str(f.type) for f in fields(Profile) if f.name not in _ARRAYS}
_READERS: dict[str, Any] = {"str": str, "int": int, "float": float, "tuple[str, ...]": lambda t: tuple(json.loads(t))}


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        RaggedConfigError: the file is missing, truncated, tampered with, or of another format or version.
    """
    path = Path(path)
    try:
        is_file = path.is_file()
    except OSError as error:
        raise RaggedConfigError(f"profile {path} cannot be read: {error.strerror}") from None
    if not is_file:
        reason = "is a directory" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise RaggedConfigError(f"profile {path} {reason}; give the .safetensors file that calib run wrote")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            # Tensors of other files may be large, or have types that numpy lacks.
            names = list(file.keys()) if metadata.get("format") == FORMAT else []
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RaggedConfigError(f"profile {path} cannot be read, it is damaged or no profile: {error}") from None
    if metadata.get("format") != FORMAT:
        raise RaggedConfigError(f"profile {path} is a safetensors file but not an sgl_ragged profile")
    for name, value in (("format_version", str(FORMAT_VERSION)), ("fit", FIT)):
        if metadata.get(name) != value:
            raise RaggedConfigError(
                f"profile {path} has {name.replace('_', ' ')} {metadata.get(name)}, this release reads {value}: "
                f"calibrate again"
            )
    statistics = {n.removeprefix(STATISTIC): a for n, a in tensors.items() if n.startswith(STATISTIC)}
    try:
        profile = Profile(
            mu=tensors["mu"],
            sigma=tensors["sigma"],
            coverage=tensors.get("coverage"),
            shares=tensors.get("shares"),
            held_out=tensors.get("held_out"),
            statistics=MappingProxyType(statistics),
            reference=from_tensors(tensors),
            quality=from_json(metadata.get("quality", "[]")),
            **{name: _READERS[kind](metadata[name]) for name, kind in _METADATA.items()},
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise RaggedConfigError(f"profile {path} is incomplete or damaged: {error}") from None
    if metadata.get("digest") != profile.digest():
        raise RaggedConfigError(
            f"profile {path} does not match its own digest: it was changed or damaged; calibrate again"
        )
    return profile


def profile_kept(profile: Profile, ratio: float, segment: int) -> np.ndarray:
    """Compute the budgets of a profile: int64 [num_layers, num_heads] tokens per segment.

    Method `coverage` gives units of 16 tokens to the steepest curves (`budgets.coverage_kept`). Method `implied` scales
    mu + alpha * sigma (TANGRAM Eq. 5) to the ratio (`budgets.fit_kept`).

    Args:
        ratio: kept / full KV bytes, in (0, 1].
        segment: tokens per segment; may differ from the profile's.

    Raises:
        RaggedConfigError: the ratio or the segment length is out of range.
    """
    if profile.coverage is not None:
        return coverage_kept(profile.coverage, ratio, segment, profile.scope)
    weights = profile.mu.astype(np.float64) + profile.alpha * profile.sigma.astype(np.float64)
    return fit_kept(weights, ratio, segment, profile.scope)


def _metadata_faults(profile: Profile) -> Iterator[str]:
    for name, known in (("method", METHODS), ("scope", SCOPES), ("queries", QUERIES)):
        value = getattr(profile, name)
        if value not in known:
            yield f"unknown {name} {value!r}; known: {', '.join(filter(None, known))}"
    for name in _TEXTS:
        yield from _text_faults(name, getattr(profile, name))
    for task in profile.tasks:
        yield from _text_faults("tasks", task)
    # `calib convert` without a model's config leaves head_dim 0, which no model has.
    for name, least in (("head_dim", 0), ("samples", 1)):
        if getattr(profile, name) < least:
            yield f"{name} {getattr(profile, name)} must be at least {least}"
    # The negation refuses NaN, too.
    if not 0.0 <= profile.alpha <= MAX_ALPHA:
        yield f"alpha {profile.alpha} is outside [0, {MAX_ALPHA:g}]"
    checks: tuple[tuple[Callable[[Any], None], Any], ...] = (
        (check_ratio, profile.ratio),
        (check_segment, profile.segment),
    )
    for check, value in checks:
        try:
            check(value)
        except RaggedConfigError as error:
            yield str(error)


def _text_faults(name: str, value: object) -> Iterator[str]:
    # Texts appear in the log and in error messages of one line.
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT_LENGTH:
        yield f"{name} must be a line of at most {_MAX_TEXT_LENGTH} printable characters"


def _share_faults(profile: Profile) -> Iterator[str]:
    mu, sigma = profile.mu, profile.sigma
    if mu.ndim != 2 or mu.shape != sigma.shape or not mu.size:
        yield f"mu {mu.shape} and sigma {sigma.shape} must be [layers, heads]"
    for name, array in (("mu", mu), ("sigma", sigma)):
        yield from range_faults(name, array, 0.0, 1.0, "it is a share of a segment")
    if not mu.any():
        yield "mu is 0 everywhere: at least one head must need a token"


def _coverage_faults(profile: Profile) -> Iterator[str]:
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
    yield from range_faults("coverage", coverage, 0.0, float(profile.segment), "it is a sum of attention to its tokens")
    if (np.diff(coverage, axis=-1) < -ROUNDING * coverage.max(axis=-1, keepdims=True)).any():
        yield "coverage has curves that fall: more tokens cannot cover less"
    if not coverage.any():
        yield "coverage is 0 everywhere: at least one head must need a token"


def _sample_faults(profile: Profile) -> Iterator[str]:
    shares, held_out = profile.shares, profile.held_out
    if shares is not None:
        if shares.shape != (len(profile.tasks), *profile.mu.shape):
            yield f"shares {shares.shape} do not fit {len(profile.tasks)} tasks"
        yield from range_faults("shares", shares, 0.0, 1.0, "they are shares of a segment")
    if held_out is not None:
        if held_out.shape != (profile.num_layers, len(HELD_OUT)):
            yield f"held_out {held_out.shape} must be [layers, {len(HELD_OUT)}]"
        yield from range_faults("held_out", held_out, 0.0, np.inf, "it has losses and shares")


def _statistic_faults(profile: Profile) -> Iterator[str]:
    return statistic_faults(profile.statistics, (profile.num_layers, profile.num_heads), profile.head_dim)


def _reference_faults(profile: Profile) -> Iterator[str]:
    return reference_faults(profile.reference)


def _quality_faults(profile: Profile) -> Iterator[str]:
    return quality_faults(profile.quality)

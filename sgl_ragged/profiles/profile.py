"""Profiles: the calibrated statistics of one model and one scorer, as one safetensors file.

A file is JSON and raw numbers only. It carries a format version, the fingerprint of the model's attention geometry
and a digest of its own contents, and is refused when any of them does not fit. docs/calibration.md lists tensors and
metadata.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_checks import FITS as FITS
from sgl_ragged.profiles.profile_checks import HELD_OUT as HELD_OUT
from sgl_ragged.profiles.profile_checks import METHODS as METHODS
from sgl_ragged.profiles.profile_checks import SCOPES as SCOPES
from sgl_ragged.profiles.profile_checks import VALUE_MEAN as VALUE_MEAN
from sgl_ragged.profiles.profile_checks import check_profile

FORMAT = "sgl_ragged.profile"
FORMAT_VERSION = 3

STATISTIC = "statistic."
"""Prefix of the scorer's own tensors in the file."""


@dataclass(frozen=True)
class Profile:
    """Calibrated head statistics of one model and one scorer; L layers, H heads, N samples, S tokens per segment.

    Arrays are float32. `mu` and `sigma` [L, H]: share of a segment that each head needs, mean and standard deviation
    (TANGRAM Eq. 5). `coverage` [L, H, S / 16]: mean peak attention of later queries that the head's best 16, 32, .. S
    tokens of a segment receive, or curves whose steps are weighed by errors of outputs (`calib.output_error`); method
    `coverage` only, from the `queries` that were looked at ("all" or "answers").
    `shares` [N, L, H]: the share of each sample, with its task in `tasks`. `held_out` [L, 5]: how well a scorer that
    was trained does on samples that it was not trained on, HELD_OUT. `statistics`: tensors [L, H, ...] that the scorer
    needs at run time, [L, 1, ...] where heads share them, and those that every profile has; float16 ones stay so.

    `ratio` is the kept share that mu was measured at; `scope` says whether it holds in each layer or over the model.
    `fit` and `alpha` say how mu and sigma become budgets (see `budgets.profile_kept`).

    Raises RaggedConfigError for what no calibration gives (`profile_checks`).
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
    fit: str = "exact"
    queries: str = ""
    dataset_hash: str = ""
    provenance: str = ""
    license: str = ""
    tasks: tuple[str, ...] = ()
    coverage: np.ndarray | None = None
    shares: np.ndarray | None = None
    held_out: np.ndarray | None = None
    statistics: MappingProxyType[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_profile(self)

    @property
    def num_layers(self) -> int:
        return int(self.mu.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.mu.shape[1])

    def digest(self) -> str:
        """16 hex digits over tensors and metadata; two profiles with equal digests serve alike."""
        state = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, array in sorted(self._tensors().items()):
            state.update(json.dumps([name, array.shape]).encode())
            state.update(array.tobytes())
        return state.hexdigest()[:16]

    def _tensors(self) -> dict[str, np.ndarray]:
        named = {name: getattr(self, name) for name in ("mu", "sigma", "coverage", "shares", "held_out")}
        named |= {STATISTIC + name: array for name, array in self.statistics.items()}
        return {
            name: np.ascontiguousarray(array, dtype=np.float16 if array.dtype == np.float16 else np.float32)
            for name, array in named.items()
            if array is not None
        }

    def _metadata(self) -> dict[str, str]:
        values = {name: getattr(self, name) for name in _METADATA}
        texts = {name: json.dumps(value) if name == "tasks" else str(value) for name, value in values.items()}
        return {"format": FORMAT, "format_version": str(FORMAT_VERSION)} | texts

    def save(self, path: str | Path) -> None:
        """Write the profile to `path` (replaces it)."""
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


_TENSOR_FIELDS = ("mu", "sigma", "coverage", "shares", "held_out", "statistics")
_METADATA = {f.name: str(f.type) for f in fields(Profile) if f.name not in _TENSOR_FIELDS}
_READERS: dict[str, Any] = {"str": str, "int": int, "float": float, "tuple[str, ...]": lambda t: tuple(json.loads(t))}


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        RaggedConfigError: the file is missing, truncated, tampered with, of another format or version.
    """
    path = Path(path)
    try:
        regular = path.is_file()
    except OSError as error:
        raise RaggedConfigError(f"profile {path} cannot be read: {error.strerror}") from None
    if not regular:
        what = "is a directory" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise RaggedConfigError(f"profile {path} {what}; give the .safetensors file that calib run wrote")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            # Another file's tensors may be large, or of types that numpy does not have.
            names = list(file.keys()) if metadata.get("format") == FORMAT else []
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RaggedConfigError(f"profile {path} cannot be read, it is damaged or no profile: {error}") from None
    if metadata.get("format") != FORMAT:
        raise RaggedConfigError(f"profile {path} is a safetensors file but not an sgl_ragged profile")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise RaggedConfigError(
            f"profile {path} has format version {metadata.get('format_version')}, this release reads "
            f"{FORMAT_VERSION}: calibrate again"
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
            **{name: _READERS[kind](metadata[name]) for name, kind in _METADATA.items()},
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise RaggedConfigError(f"profile {path} is incomplete or damaged: {error}") from None
    if metadata.get("digest") != profile.digest():
        raise RaggedConfigError(
            f"profile {path} does not match its own digest: it was changed or damaged, make it anew"
        )
    return profile

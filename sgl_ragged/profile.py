"""Profiles: the calibrated statistics of one model and one scorer, as one safetensors file.

A file holds the tensors `mu` and `sigma` (float32 [layers, heads], share of a segment that each head
needs: mean and standard deviation over segments and samples) and string metadata. It is JSON and raw
numbers only, carries a format version, the fingerprint of the model's attention geometry and a digest
of its own contents, and is refused when any of them does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sgl_ragged.errors import RaggedConfigError

FORMAT = "sgl_ragged.profile"
FORMAT_VERSION = 1

# Everything that decides which (layer, head) a budget belongs to and what its keys look like.
_FINGERPRINT_KEYS = (
    "architectures",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "rope_theta",
    "vocab_size",
)


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Fingerprint of a Hugging Face model config: 16 hex digits over its attention geometry.

    Args:
        config: `config.json` as a mapping. Keys that are absent count as absent; `head_dim` falls back to
            hidden_size / num_attention_heads and `num_key_value_heads` to num_attention_heads, and
            `rope_theta` is found inside `rope_parameters` too, so that the file and the loaded config agree.
    """
    values = dict(config)
    rope = values.get("rope_parameters") or {}
    if values.get("rope_theta") is None and isinstance(rope, Mapping):
        values["rope_theta"] = rope.get("rope_theta")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if values.get("head_dim") is None and values.get("hidden_size") and values.get("num_attention_heads"):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if values.get("rope_theta") is not None:
        values["rope_theta"] = float(values["rope_theta"])
    geometry = {key: values.get(key) for key in _FINGERPRINT_KEYS}
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Profile:
    """Calibrated head statistics. Arrays are float32 [num_layers, num_heads]; shares are in [0, 1]."""

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
    dataset_hash: str = ""

    def __post_init__(self) -> None:
        if self.mu.ndim != 2 or self.mu.shape != self.sigma.shape:
            raise RaggedConfigError(f"profile: mu {self.mu.shape} and sigma {self.sigma.shape} must be [layers, heads]")
        for name, array in (("mu", self.mu), ("sigma", self.sigma)):
            if not np.isfinite(array).all() or (array < 0).any():
                raise RaggedConfigError(f"profile: {name} has negative or non-finite entries")
        if (self.mu > 1).any():
            raise RaggedConfigError("profile: mu has entries above 1; it is a share of a segment")

    @property
    def num_layers(self) -> int:
        return int(self.mu.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.mu.shape[1])

    def digest(self) -> str:
        """16 hex digits over tensors and metadata; two profiles with equal digests serve alike."""
        state = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for array in (self.mu, self.sigma):
            state.update(np.ascontiguousarray(array, dtype=np.float32).tobytes())
        return state.hexdigest()[:16]

    def _metadata(self) -> dict[str, str]:
        names = [f.name for f in fields(self) if f.name not in ("mu", "sigma")]
        return {"format": FORMAT, "format_version": str(FORMAT_VERSION)} | {n: str(getattr(self, n)) for n in names}

    def save(self, path: str | Path) -> None:
        """Write the profile to `path` (replaces it)."""
        tensors = {name: np.ascontiguousarray(getattr(self, name), dtype=np.float32) for name in ("mu", "sigma")}
        save_file(tensors, str(path), metadata=self._metadata() | {"digest": self.digest()})

    def require_model(self, *, fingerprint: str, num_layers: int, num_heads: int, head_dim: int, model: str) -> None:
        """Raise RaggedConfigError unless the profile was made for this model."""
        have = (self.num_layers, self.num_heads, self.head_dim)
        want = (num_layers, num_heads, head_dim)
        if have != want:
            raise RaggedConfigError(
                f"the profile was calibrated for {self.model_id!r} with (layers, heads, head_dim) = {have}, "
                f"but {model!r} has {want}: pass a profile of this model or none"
            )
        if self.model_fingerprint != fingerprint:
            raise RaggedConfigError(
                f"the profile was calibrated for {self.model_id!r} (fingerprint {self.model_fingerprint}), "
                f"but {model!r} has fingerprint {fingerprint}: pass a profile of this model or none"
            )


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        RaggedConfigError: the file is missing, truncated, tampered with, of another format or version.
    """
    path = Path(path)
    if not path.is_file():
        raise RaggedConfigError(f"profile {path} does not exist")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise RaggedConfigError(f"profile {path} cannot be read, it is damaged or no profile: {error}") from None
    if metadata.get("format") != FORMAT:
        raise RaggedConfigError(f"profile {path} is a safetensors file but not an sgl_ragged profile")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise RaggedConfigError(
            f"profile {path} has format version {metadata.get('format_version')}, this release reads {FORMAT_VERSION}"
        )
    try:
        profile = Profile(
            mu=tensors["mu"],
            sigma=tensors["sigma"],
            model_id=metadata["model_id"],
            model_fingerprint=metadata["model_fingerprint"],
            head_dim=int(metadata["head_dim"]),
            scorer=metadata["scorer"],
            method=metadata["method"],
            scope=metadata["scope"],
            ratio=float(metadata["ratio"]),
            segment=int(metadata["segment"]),
            samples=int(metadata["samples"]),
            dataset_hash=metadata.get("dataset_hash", ""),
        )
    except (KeyError, ValueError) as error:
        raise RaggedConfigError(f"profile {path} is incomplete or damaged: {error}") from None
    if metadata.get("digest") != profile.digest():
        raise RaggedConfigError(
            f"profile {path} does not match its own digest: it was changed or damaged, make it anew"
        )
    return profile

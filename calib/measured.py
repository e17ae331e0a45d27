"""Measured head retention: npz files that TANGRAM's reference implementation publishes and builds.

Each file holds the number of tokens that heads kept in sample contexts of one model, with one scorer, after the
non-uniform top-k of TANGRAM Eq. 3 at one ratio.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError

SCORERS = ("expected_attention", "fastkvzip", "keydiff", "snapkv")
"""Scorers of these files; their names are the same as here."""

_SCOPES = {"non_uniform": "model", "non_uniform_per_layer": "layer"}
_ARRAYS = ("raw_kept", "raw_ratio", "sample_meta", "base_ratios", "static_layer_ids", "meta")


@dataclass(frozen=True)
class Measured:
    """Shares of tokens that heads kept in N contexts with one scorer; L measured layers, H heads.

    Args:
        evictable: float64 [N, L, H], tokens kept between the sinks and the recent window / all tokens but the sinks.
        whole: float64 [N, L, H], all kept tokens, including sinks and recent window / tokens of the context.
        tasks: the task of each context, "unknown" if the file does not name it.
        layers: numbers of the measured layers in a model of `model_layers` layers.
        scope: where heads competed for the ratio, "layer" or "model".
        ratio: share of the whole context that heads could keep.
    """

    evictable: np.ndarray
    whole: np.ndarray
    tasks: tuple[str, ...]
    layers: tuple[int, ...]
    model_layers: int
    model_id: str
    scorer: str
    scope: str
    ratio: float


def load_measured(path: str | Path) -> Measured:
    """Read a measured npz file, without unpickling anything.

    Raises:
        RaggedConfigError: the file is missing, damaged, of another kind, or contradicts itself.
    """
    path = Path(path)
    if not path.is_file():
        raise RaggedConfigError(f"measured profile {path} does not exist")
    try:
        arrays = _read_arrays(path)
        meta = json.loads(arrays["meta"].tobytes())
        if not isinstance(meta, dict):
            raise ValueError("meta is not a JSON object")
        return _measured(arrays, meta)
    except (ValueError, TypeError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise RaggedConfigError(
            f"measured profile {path} cannot be read, it is damaged or of another kind: {reason}"
        ) from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    loaded = np.load(path, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("it is no npz archive")
    with loaded:
        missing = [name for name in _ARRAYS if name not in loaded.files]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return {name: loaded[name] for name in _ARRAYS}


def _measured(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> Measured:
    kept, evictable, contexts = arrays["raw_kept"], arrays["raw_ratio"], arrays["sample_meta"]
    if kept.ndim != 4 or kept.shape[0] != 1 or 0 in kept.shape or arrays["base_ratios"].shape != (1,):
        raise ValueError(f"raw_kept {kept.shape} must be [1, samples, layers, heads]: one ratio a file")
    _, samples, layers, _ = kept.shape
    if evictable.shape != kept.shape or contexts.shape != (samples, 4) or arrays["static_layer_ids"].shape != (layers,):
        raise ValueError(
            f"raw_ratio {evictable.shape}, sample_meta {contexts.shape} and static_layer_ids "
            f"{arrays['static_layer_ids'].shape} do not fit raw_kept {kept.shape}"
        )
    total = contexts[:, 2].astype(np.float64)
    if (total <= 0).any():
        raise ValueError("sample_meta has contexts without tokens")
    whole = kept[0] / total[:, None, None]
    for name, shares in (("raw_ratio", evictable), ("raw_kept", whole)):
        if not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError(f"{name} has entries outside 0 .. the whole context")
    if meta["level"] not in _SCOPES:
        raise ValueError(f"unknown level {meta['level']!r}; known: {', '.join(_SCOPES)}")
    if meta["scorer"] not in SCORERS:
        raise ValueError(f"unknown scorer {meta['scorer']!r}; known: {', '.join(SCORERS)}")
    ratio = float(arrays["base_ratios"][0])
    if not 0 < ratio <= 1:
        raise ValueError(f"base ratio {ratio} is outside (0, 1]")
    return Measured(
        evictable=evictable[0].astype(np.float64),
        whole=whole,
        tasks=_tasks(meta, samples),
        layers=tuple(int(layer) for layer in arrays["static_layer_ids"]),
        model_layers=int(meta["num_hidden_layers"]),
        model_id=str(meta["model_name"]),
        scorer=meta["scorer"],
        scope=_SCOPES[meta["level"]],
        # The file stores 0.3 in float32; the seventh digit is rounding.
        ratio=round(ratio, 6),
    )


def _tasks(meta: dict[str, Any], samples: int) -> tuple[str, ...]:
    """Name the tasks of the samples, which are in the order of `dataset_mix` ("name:count,name:count")."""
    names: list[str] = []
    for entry in str(meta.get("dataset_mix", "")).split(","):
        name, _, count = entry.strip().rpartition(":")
        if name and count.isdigit():
            names += [name] * int(count)
    if len(names) == samples:
        return tuple(names)
    sources = meta.get("sample_sources") or []
    return (str(sources[0]) if len(sources) == 1 else "unknown",) * samples

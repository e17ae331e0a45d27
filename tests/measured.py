"""Measured npz files in the format of TANGRAM's reference implementation, made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SINKS, WINDOW = 32, 4096


def write_measured(
    path: Path,
    *,
    layers: int = 3,
    heads: int = 4,
    samples: int = 6,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    **meta: Any,
) -> Path:
    """Write a file with heads that differ more than samples do; `meta` overrides or, with None, removes entries.

    numbers: of the layers in the model; all of its layers if not given.
    """
    rng = np.random.default_rng(seed)
    total = rng.integers(16_000, 26_000, samples)
    evictable = np.clip(rng.uniform(0, 0.2, (layers, heads)) + rng.normal(0, 0.01, (samples, layers, heads)), 0, 1)
    kept = np.round(evictable * (total - SINKS)[:, None, None]).astype(np.int32) + SINKS + WINDOW
    entries = {
        "model_name": "maker/toy",
        "num_hidden_layers": layers,
        "scorer": "keydiff",
        "level": "non_uniform_per_layer",
        "sample_sources": ["one", "two"],
        "dataset_mix": f"one:{samples - 2},two:2",
        **meta,
    }
    text = json.dumps({key: value for key, value in entries.items() if value is not None})
    np.savez(
        path,
        raw_kept=kept[None],
        raw_ratio=((kept - SINKS - WINDOW) / (total - SINKS)[:, None, None])[None],
        sample_meta=np.stack([total - SINKS, np.full(samples, SINKS), total, np.full(samples, WINDOW)], axis=1).astype(
            np.int32
        ),
        base_ratios=np.array([0.3], np.float32),
        static_layer_ids=np.arange(layers) if numbers is None else np.array(numbers),
        meta=np.frombuffer(text.encode(), np.uint8),
    )
    return path

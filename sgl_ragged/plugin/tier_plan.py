"""What the launcher decides about tiers below the device (`--enable-hierarchical-cache`)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.codecs import make_codec
from sgl_ragged.mem_pool.restore_schedule import AUTO
from sgl_ragged.plan import CODEC_NAMES, ServingPlan, TierPlan
from sgl_ragged.plugin.calibrating import model_folder
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.profile_cache import weights_identity

STORAGE_BACKENDS = ("file",)
"""Where pages may go beside the host: SGLang's backends whose keys name the model, as far as they were tried."""

NAMED = ("dtype", "quantization", "json_model_override_args", "load_format", "torchao_config")
"""Settings of the server that change what a model computes, beside its files."""


def plan_tier(plan: ServingPlan, options: RaggedOptions, view: Any, sized: bool, kv_dtype: torch.dtype) -> TierPlan:
    """What the tiers hold.

    Args:
        view: SGLang's resolved settings.
        sized: whether the user said how large the host's part is.
        kv_dtype: of the cache, as far as the launcher knows it.

    Raises:
        RaggedConfigError: the codec cannot serve these budgets or this cache.
    """
    codec = options.host_codec or CODEC_NAMES[0]
    for layout in plan.layouts:
        # A codec refuses what it cannot serve; here rather than in a worker.
        make_codec(codec, layout, kv_dtype)
    settings = {name: str(getattr(view, name, None)) for name in NAMED}
    # The path is not named: the same weights in another folder give the same slabs.
    folder = model_folder(view)
    config = folder / "config.json"
    computes = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    state = json.dumps([plan.digest, weights_identity(folder), computes, settings], sort_keys=True)
    return TierPlan(
        codec=codec,
        served=hashlib.sha256(state.encode()).hexdigest()[:16],
        sized=sized,
        restore=options.restore or AUTO,
    )


def refuse_storage(backend: str | None) -> None:
    """Raise RaggedConfigError for a storage backend that pages of slabs are not given to."""
    if backend is not None and backend not in STORAGE_BACKENDS:
        raise RaggedConfigError(
            f"--hicache-storage-backend {backend} was not tried with --kv-pool ragged, or its keys do not name the "
            f"model, so that it could give slabs of another ratio or profile; use {' or '.join(STORAGE_BACKENDS)}"
        )

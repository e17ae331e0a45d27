"""From a model's config and the options to the budgets, the slab layout and the scorer's tensors of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_ragged.budgets import profile_kept, uniform_kept
from sgl_ragged.bundled import find_bundled
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fingerprint import config_fingerprint
from sgl_ragged.grouping import group_largest
from sgl_ragged.layout import SlabLayout
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.profile import Profile, load_profile
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import scorer_statistics


def profile_path(options: RaggedOptions, model_config: Any) -> Path | None:
    """The profile that --ragged-profile names; for `auto` the bundled one of this model and scorer; None for uniform.

    Args:
        model_config: SGLang's ModelConfig.
    """
    if options.profile == "uniform":
        return None
    if options.profile == "auto":
        return find_bundled(_fingerprint(model_config), options.scorer)
    return Path(options.profile)


def model_profile(options: RaggedOptions, model_config: Any) -> Profile | None:
    """Load the profile and check that it was made for this model and scorer.

    Raises:
        RaggedConfigError: the file is damaged, or made for another model or scorer.
    """
    path = profile_path(options, model_config)
    if path is None:
        return None
    profile = load_profile(path)
    profile.require_model(
        fingerprint=_fingerprint(model_config),
        num_layers=model_config.num_hidden_layers,
        num_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
        model=model_config.model_path,
    )
    if profile.scorer != options.scorer:
        raise RaggedConfigError(
            f"the profile was calibrated with scorer {profile.scorer!r}, --ragged-scorer is {options.scorer!r}: "
            f"use the same"
        )
    return profile


def budget_source(options: RaggedOptions, model_config: Any) -> str:
    """One line for the log: where the budgets come from."""
    path, profile = profile_path(options, model_config), model_profile(options, model_config)
    if profile is None:
        why = "--ragged-profile uniform" if options.profile == "uniform" else "no bundled profile for this model"
        return (
            f"{why}: every head gets the same budget (ratio {options.ratio}). Heads differ in what they need; a "
            f"calibrated profile moves the same bytes to the heads that use them (python -m calib run)"
        )
    kind = "bundled profile" if options.profile == "auto" else "profile"
    measured = f"{profile.method}, calibrated at ratio {profile.ratio} and segment {profile.segment}"
    return f"budgets from {kind} {path} ({profile.model_id}, {measured}, digest {profile.digest()})"


def model_kept(options: RaggedOptions, model_config: Any) -> np.ndarray:
    """Kept tokens per segment of the whole model, int64 [layers, heads], before grouping."""
    profile = model_profile(options, model_config)
    if profile is None:
        shape = (model_config.num_hidden_layers, model_config.get_total_num_kv_heads())
        return uniform_kept(*shape, options.ratio, options.segment)
    return profile_kept(profile, options.ratio, options.segment)


def rank_heads(num_heads: int, tp_rank: int, tp_size: int) -> slice:
    """The heads of one tensor-parallel rank: a contiguous share, as SGLang splits them."""
    if tp_size <= num_heads:
        per_rank = num_heads // tp_size
        return slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    head = tp_rank * num_heads // tp_size
    return slice(head, head + 1)


def rank_layout(options: RaggedOptions, model_config: Any, tp_rank: int, tp_size: int) -> SlabLayout:
    """The slab layout of one rank. Groups of heads do not span ranks."""
    kept = model_kept(options, model_config)
    kept = kept[:, rank_heads(kept.shape[1], tp_rank, tp_size)]
    kept = group_largest(kept, options.heads_per_group)
    return SlabLayout(kept=kept, head_dim=model_config.head_dim, segment=options.segment)


def model_statistics(options: RaggedOptions, model_config: Any) -> list[dict[str, torch.Tensor]]:
    """Per layer, the scorer's tensors [heads, ...] of the whole model; refuses as `scorer_statistics` does."""
    return scorer_statistics(
        get_scorer(options.scorer),
        model_profile(options, model_config),
        options.scorer_weights,
        model_config.num_hidden_layers,
        model_config.get_total_num_kv_heads(),
    )


def _fingerprint(model_config: Any) -> str:
    return config_fingerprint(model_config.hf_text_config.to_dict())

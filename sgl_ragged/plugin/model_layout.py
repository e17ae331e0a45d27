"""From a model's config and the options to the slab layout of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_ragged.budgets import profile_kept, uniform_kept
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.layout import SlabLayout
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.profile import Profile, config_fingerprint, load_profile


def model_profile(options: RaggedOptions, model_config: Any) -> Profile | None:
    """Load the profile that the options name and check that it was made for this model and scorer.

    Args:
        model_config: SGLang's ModelConfig.

    Raises:
        RaggedConfigError: the file is damaged, or made for another model or scorer.
    """
    if options.profile is None:
        return None
    profile = load_profile(options.profile)
    profile.require_model(
        fingerprint=config_fingerprint(model_config.hf_text_config.to_dict()),
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
    profile = model_profile(options, model_config)
    if profile is None:
        return (
            f"no --ragged-profile: every head gets the same budget (ratio {options.ratio}). Heads differ in what they "
            f"need; a calibrated profile moves the same bytes to the heads that use them (docs/profiles.md)"
        )
    return f"budgets from profile {options.profile} ({profile.model_id}, digest {profile.digest()})"


def model_kept(options: RaggedOptions, model_config: Any) -> np.ndarray:
    """Kept tokens per segment of the whole model, int64 [layers, heads]."""
    profile = model_profile(options, model_config)
    if profile is None:
        shape = (model_config.num_hidden_layers, model_config.get_total_num_kv_heads())
        return uniform_kept(*shape, options.ratio, options.segment)
    return profile_kept(profile, options.ratio, options.segment)


def rank_layout(options: RaggedOptions, model_config: Any, tp_rank: int, tp_size: int) -> SlabLayout:
    """The slab layout of one tensor-parallel rank: its contiguous share of the heads, as SGLang splits them."""
    kept = model_kept(options, model_config)
    num_heads = kept.shape[1]
    if tp_size <= num_heads:
        per_rank = num_heads // tp_size
        heads = slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    else:
        head = tp_rank * num_heads // tp_size
        heads = slice(head, head + 1)
    return SlabLayout(kept=kept[:, heads], head_dim=model_config.head_dim, segment=options.segment)

"""From SGLang's model config and the options to the slab layout and the scorer's tensors of one rank."""

from __future__ import annotations

from typing import Any

import torch

from sgl_ragged.choice import BudgetChoice, choose_budgets
from sgl_ragged.fingerprint import config_fingerprint
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.grouping import group_largest
from sgl_ragged.layout import SlabLayout
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import scorer_statistics


def model_geometry(model_config: Any) -> ModelGeometry:
    """Geometry of the whole model, as SGLang sees it (model_config is its ModelConfig)."""
    heads = model_config.get_total_num_kv_heads()
    return ModelGeometry(
        name=model_config.model_path,
        fingerprint=config_fingerprint(model_config.hf_text_config.to_dict()),
        num_layers=model_config.num_hidden_layers,
        num_heads=heads,
        q_per_kv=model_config.get_total_num_attention_heads() // heads,
        head_dim=model_config.head_dim,
    )


def model_budgets(options: RaggedOptions, geometry: ModelGeometry) -> BudgetChoice:
    """The budgets of the whole model; refuses as `choose_budgets` does."""
    return choose_budgets(
        geometry,
        profile=options.profile,
        scorer=options.scorer,
        ratio=options.ratio,
        segment=options.segment,
    )


def model_statistics(options: RaggedOptions, geometry: ModelGeometry) -> list[dict[str, torch.Tensor]]:
    """Per layer, the scorer's tensors [heads, ...] of the whole model; refuses as `scorer_statistics` does."""
    profile = model_budgets(options, geometry).profile
    return scorer_statistics(
        get_scorer(options.scorer), profile, options.scorer_weights, geometry.num_layers, geometry.num_heads
    )


def rank_heads(num_heads: int, tp_rank: int, tp_size: int) -> slice:
    """The heads of one tensor-parallel rank: a contiguous share, as SGLang splits them."""
    if tp_size <= num_heads:
        per_rank = num_heads // tp_size
        return slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    head = tp_rank * num_heads // tp_size
    return slice(head, head + 1)


def rank_layout(options: RaggedOptions, geometry: ModelGeometry, tp_rank: int, tp_size: int) -> SlabLayout:
    """The slab layout of one rank. Groups of heads do not span ranks."""
    kept = model_budgets(options, geometry).kept[:, rank_heads(geometry.num_heads, tp_rank, tp_size)]
    kept = group_largest(kept, options.heads_per_group)
    return SlabLayout(kept=kept, head_dim=geometry.head_dim, segment=options.segment)

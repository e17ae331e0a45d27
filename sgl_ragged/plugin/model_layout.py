"""From SGLang's model config and the options to the slab layout and the scorer's tensors of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sgl_ragged.fingerprint import config_fingerprint
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.grouping import group_largest
from sgl_ragged.layout import SlabLayout
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.plugin.served_budgets import ServedBudgets
from sgl_ragged.scorers import get_scorer


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


def served_budgets(options: RaggedOptions) -> ServedBudgets:
    """What the launcher has read for the workers."""
    assert options.budgets is not None, "the launcher settles the options before any worker starts"
    return options.budgets


def rank_heads(options: RaggedOptions, geometry: ModelGeometry, tp_rank: int, tp_size: int) -> np.ndarray:
    """int64 [layers, heads of the rank]: the model's heads that one tensor-parallel rank serves, in its order.

    Those of the placement, else a contiguous share, as SGLang splits them; with more ranks than heads, one.
    """
    if options.placement is not None:
        return options.placement.heads[:, tp_rank]
    heads = geometry.num_heads
    first, count = tp_rank * heads // tp_size, max(heads // tp_size, 1)
    return np.tile(np.arange(first, first + count), (geometry.num_layers, 1))


def rank_layout(options: RaggedOptions, geometry: ModelGeometry, tp_rank: int, tp_size: int) -> SlabLayout:
    """The slab layout of one rank. Groups of heads do not span ranks."""
    heads, placement = rank_heads(options, geometry, tp_rank, tp_size), options.placement
    kept = np.take_along_axis(served_budgets(options).kept, heads, axis=1)
    if placement is not None and placement.splits_heads:
        share, first = placement.kept[:, tp_rank], placement.first[:, tp_rank]
        full = geometry.num_heads // tp_size
        return SlabLayout(share, geometry.head_dim, options.segment, total=kept, first=first, full_heads=full)
    kept = group_largest(kept, options.heads_per_group)
    return SlabLayout(kept=kept, head_dim=geometry.head_dim, segment=options.segment)


def rank_statistics(
    options: RaggedOptions, geometry: ModelGeometry, tp_rank: int, tp_size: int
) -> list[dict[str, torch.Tensor]]:
    """Per layer, the scorer's tensors [heads of the rank, ...] on the CPU, [1, ...] those that heads share."""
    heads, shared = rank_heads(options, geometry, tp_rank, tp_size), get_scorer(options.scorer).shared_statistics
    return [
        {name: torch.from_numpy(array if name in shared else array[heads[layer]]) for name, array in tensors.items()}
        for layer, tensors in enumerate(served_budgets(options).statistics)
    ]

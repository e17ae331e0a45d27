"""Decide which rank serves which heads, once in the launcher, from the budgets."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.fairkv.weights import require_projections
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.profiles.geometry import ModelGeometry

logger = logging.getLogger(__name__)

_LOAD_FORMATS = ("auto", "safetensors", "pt", "fastsafetensors")
"""Formats that SGLang's default loader reads tensor by tensor, under the checkpoint's own names."""


def place_heads(plan: ServingPlan, start: ModelStart) -> ServingPlan:
    """Return the plan with the mode of `fairkv` and its placement.

    Without the flag the mode is permute where that is possible, else none with a warning and its reason.

    Raises:
        RaggedConfigError: --ragged-fairkv names a mode that is not possible here.
    """
    mode = start.options.fairkv
    if mode == "none" or (mode is None and plan.ranks == 1):
        return plan
    try:
        _require_movable(plan, start)
    except RaggedConfigError as error:
        if mode is not None:
            raise
        logger.warning("--ragged-fairkv permute, the default, is not possible: %s", error)
        return plan
    mode = mode or "permute"
    placement = place_stages(plan, mode, _cost(plan, start.model, start.kv_dtype.itemsize))
    return dataclasses.replace(plan, fairkv=mode, placement=placement)


def place_stages(plan: ServingPlan, mode: str, cost: CostModel) -> Placement:
    """Return the placement of heads in all layers, balanced within each pipeline stage.

    It is balanced over the whole model if stages need different numbers of places, since SGLang has one number."""
    bounds = plan.stages or ((0, len(plan.kept)),)
    parts = [plan_placement(plan.kept[first:end], plan.ranks, mode, cost=cost) for first, end in bounds]
    if len({part.places for part in parts}) > 1:
        return plan_placement(plan.kept, plan.ranks, mode, cost=cost)
    heads, kept = (np.concatenate([getattr(part, name) for part in parts]) for name in ("heads", "kept"))
    return Placement(heads, kept, mode)


def take_placement(plan: ServingPlan, placement: Placement | None, start: ModelStart) -> ServingPlan:
    """Return the plan with a placement that another node has made.

    Raises:
        RaggedConfigError: heads cannot be moved here.
    """
    if placement is None:
        return plan
    _require_movable(plan, start)
    return dataclasses.replace(plan, fairkv=placement.mode, placement=placement)


def model_overrides(plan: ServingPlan, given: str) -> str | None:
    """Return --json-model-override-args that give every rank a head for each of its places; None if it has them.

    Args:
        given: the arguments so far.
    """
    placement, geometry = plan.placement, plan.geometry
    if placement is None or placement.ranks * placement.places == geometry.num_heads:
        return None
    heads = placement.ranks * placement.places
    ours = dict(num_key_value_heads=heads, num_attention_heads=heads * geometry.q_per_kv, head_dim=geometry.head_dim)
    return json.dumps(json.loads(given) | ours)


def require_places(plan: ServingPlan, expanded: ModelGeometry) -> None:
    """Raise RaggedConfigError unless the model with `model_overrides` has one head per place."""
    placement, geometry = plan.placement, plan.geometry
    assert placement is not None
    found = (expanded.num_heads, expanded.q_per_kv, expanded.head_dim)
    if found != (placement.ranks * placement.places, geometry.q_per_kv, geometry.head_dim):
        raise RaggedConfigError(
            f"--ragged-fairkv split needs {placement.places} heads on each of {placement.ranks} ranks, but the config "
            f"of {geometry.name} does not take other numbers of heads; use --ragged-fairkv permute"
        )


def _cost(plan: ServingPlan, model_config: Any, kv_itemsize: int) -> CostModel:
    """Return the costs of a place; all placements share the costs of other weights."""
    return CostModel(
        hidden=model_config.hidden_size,
        head_dim=plan.geometry.head_dim,
        q_per_kv=plan.geometry.q_per_kv,
        segment=plan.segment,
        weight_itemsize=model_config.dtype.itemsize,
        kv_itemsize=plan.form.row_bytes(plan.geometry.head_dim, kv_itemsize) / (2 * plan.geometry.head_dim),
        header_bytes=plan.form.header_bytes(plan.geometry.head_dim, kv_itemsize),
    )


def _require_movable(plan: ServingPlan, start: ModelStart) -> None:
    """Raise RaggedConfigError where heads cannot be moved between ranks, as far as the launcher can see."""
    ranks, geometry, view, model_config = plan.ranks, plan.geometry, start.view, start.model
    quantization = model_config.quantization
    reasons = (
        (ranks == 1, "there is one rank; use --tp"),
        (start.options.observer is not None, "the calibrator records heads in the model's order"),
        (model_config.is_multimodal, "other towers of a multimodal model have attention layers, too"),
        (geometry.num_heads % ranks != 0, f"{geometry.num_heads} KV heads cannot be divided among {ranks} ranks"),
        (view.load_format not in _LOAD_FORMATS, f"--load-format {view.load_format} bypasses the default loader"),
        (quantization is not None, f"the weights are quantised ({quantization}); blocks of weights may cross heads"),
        (bool(view.enable_lora or view.lora_paths), "the weights of LoRA adapters would not be moved with them"),
    )
    for applies, reason in reasons:
        if applies:
            raise RaggedConfigError(f"heads cannot be moved between ranks: {reason}; use --ragged-fairkv none")
    names = _checkpoint_names(Path(model_config.model_path))
    if names:
        require_projections(names, geometry.all_layers)


def _checkpoint_names(folder: Path) -> list[str]:
    """Return the names of all tensors of a local safetensors checkpoint; empty if there is none.

    Checkpoints that are still to be fetched, and other files, are checked while they are loaded.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return list(json.loads(index.read_text())["weight_map"])
        names: list[str] = []
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names += file.keys()
        return names
    except (OSError, ValueError, KeyError, SafetensorError):
        # A damaged file is SGLang's to report: it reads more of it.
        return []

"""Which rank serves which heads: decided once in the launcher, from the budgets, and carried to every worker."""

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
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.plugin.model_layout import model_geometry, served_budgets
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.scorers import get_scorer

logger = logging.getLogger(__name__)

_LOAD_FORMATS = ("auto", "safetensors", "pt", "fastsafetensors")
"""What SGLang's default loader reads tensor by tensor, under the checkpoint's own names."""


def place_heads(
    options: RaggedOptions, view: Any, model_config: Any, geometry: ModelGeometry, kernel: str
) -> RaggedOptions:
    """The options as workers follow them: with `fairkv` settled and the placement it asks for.

    Not given means permute where that is possible, else none with a warning that says why.

    Args:
        options: with geometry and budgets.
        view: SGLang's resolved settings.
        model_config: SGLang's ModelConfig.
        kernel: which operations will serve.

    Raises:
        RaggedConfigError: a mode was asked for that cannot be honoured.
    """
    mode, ranks = options.fairkv, view.tp_size
    if mode == "none" or (mode is None and ranks == 1):
        return dataclasses.replace(options, fairkv="none")
    try:
        _require_movable(options, view, model_config, geometry)
    except RaggedConfigError as error:
        if mode is not None:
            raise
        logger.warning("--ragged-fairkv permute, the default, is not possible: %s", error)
        return dataclasses.replace(options, fairkv="none")
    mode = mode or "permute"
    if mode == "split":
        refuse_split(options, kernel)
    placement = plan_placement(served_budgets(options).kept, ranks, mode, cost=_cost(options, model_config))
    return dataclasses.replace(options, fairkv=mode, placement=placement)


def refuse_ranks(options: RaggedOptions, ranks: int, geometry: ModelGeometry) -> None:
    """Raise RaggedConfigError for a number of ranks that cannot share the model's heads evenly."""
    heads, queries = geometry.num_heads, geometry.num_heads * geometry.q_per_kv
    if heads % ranks and (ranks % heads or queries % ranks):
        raise RaggedConfigError(
            f"--tp {ranks} does not divide {heads} KV heads, nor is it a multiple of them that divides {queries} query "
            f"heads; use another number of ranks"
        )
    if ranks > heads and get_scorer(options.scorer).queries:
        raise RaggedConfigError(
            f"scorer {options.scorer!r} looks at the queries of a head, and with --tp {ranks} a rank has only some of "
            f"those of {heads} heads; use at most {heads} ranks, or another --ragged-scorer"
        )


def describe_placement(placement: Placement, kept: np.ndarray) -> str:
    """One line for the log: how busy ranks are in attention, with the placement and without.

    A layer takes as long as its fullest rank: busy is the mean over the largest load, summed over layers.

    Args:
        kept: int [layers, heads], what the placement was made from.
    """
    before = plan_placement(kept, placement.ranks, "none").load
    busy = [load.mean(axis=1).sum() / load.max(axis=1).sum() for load in (before, placement.load)]
    largest = [int(load.sum(axis=0).max()) for load in (before, placement.load)]
    return (
        f"heads placed on {placement.ranks} ranks ({placement.mode}): busy {busy[0]:.3f} -> {busy[1]:.3f}, "
        f"largest slab {largest[0]} -> {largest[1]} tokens of all layers"
    )


def model_overrides(options: RaggedOptions, given: str) -> str | None:
    """SGLang's --json-model-override-args that give every rank a head for each of its places; None if it has them.

    Args:
        given: the arguments so far.
    """
    placement, geometry = options.placement, options.geometry
    if placement is None or geometry is None or placement.ranks * placement.places == geometry.num_heads:
        return None
    heads = placement.ranks * placement.places
    ours = dict(num_key_value_heads=heads, num_attention_heads=heads * geometry.q_per_kv, head_dim=geometry.head_dim)
    return json.dumps(json.loads(given) | ours)


def require_places(options: RaggedOptions, expanded: ModelGeometry) -> None:
    """Raise RaggedConfigError unless the model with `model_overrides` has as many heads as there are places."""
    placement, geometry = options.placement, options.geometry
    assert placement is not None
    assert geometry is not None
    found = (expanded.num_heads, expanded.q_per_kv, expanded.head_dim)
    if found != (placement.ranks * placement.places, geometry.q_per_kv, geometry.head_dim):
        raise RaggedConfigError(
            f"--ragged-fairkv split needs {placement.places} heads on each of {placement.ranks} ranks, but the config "
            f"of {geometry.name} does not take other numbers of heads; use --ragged-fairkv permute"
        )


def refuse_split(options: RaggedOptions, kernel: str) -> None:
    """Raise RaggedConfigError for options that heads in parts do not go with."""
    if kernel == "flashinfer":
        raise RaggedConfigError(
            "--ragged-fairkv split is not there for --ragged-kernel flashinfer, which attends to whole heads; "
            "use --ragged-kernel triton, or --ragged-fairkv permute"
        )
    if options.heads_per_group > 1:
        raise RaggedConfigError(
            "--ragged-fairkv split stores parts of heads, which cannot share a budget; drop --ragged-heads-per-group"
        )


def _cost(options: RaggedOptions, model_config: Any) -> CostModel:
    """What a place costs; other weights are the same in all placements."""
    geometry = model_geometry(model_config)
    return CostModel(
        hidden=model_config.hidden_size,
        head_dim=geometry.head_dim,
        q_per_kv=geometry.q_per_kv,
        segment=options.segment,
        weight_itemsize=model_config.dtype.itemsize,
        kv_itemsize=model_config.dtype.itemsize,
    )


def _require_movable(options: RaggedOptions, view: Any, model_config: Any, geometry: ModelGeometry) -> None:
    """Raise RaggedConfigError where heads cannot be moved between ranks, as far as the launcher can see."""
    ranks, quantization = view.tp_size, model_config.quantization
    reasons = (
        (ranks == 1, "there is one rank; use --tp"),
        (options.observer is not None, "the calibrator records heads in the model's order"),
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
        require_projections(names, geometry.num_layers)


def _checkpoint_names(folder: Path) -> list[str]:
    """Names of all tensors of a local safetensors checkpoint; empty where there is none to look at.

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

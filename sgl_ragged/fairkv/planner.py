"""Planner of head placement over ranks. Plain numpy; the same input gives the same placement on every machine.

Modes: `none` (contiguous heads), `permute` (equally many heads on each rank, chosen per layer) and `split` (a head's
kept tokens are divided over the ranks that hold it). In a decode step a rank reads everything that it stores of a
layer. So the planner lowers the largest load of each layer first, and then numbers the ranks of each layer so that
their totals are even.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.permute import permute_layer
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.splitting import split_layer
from sgl_ragged.profiles.budgets import UNIT

MODES = ("none", "permute", "split")


def plan_placement(
    kept: np.ndarray, ranks: int, mode: str, *, extra_places: int = 1, cost: CostModel | None = None
) -> Placement:
    """Place the heads of all layers.

    Args:
        kept: int [num_layers, num_heads], tokens that each head keeps per sealed segment, multiples of UNIT.
        ranks: tensor-parallel ranks, a divisor of num_heads.
        mode: one of MODES.
        extra_places: places beyond num_heads / ranks that each rank may have in each layer; for `split`.
        cost: model of a step's bytes. Extra places are used only if the step then reads less, including their weights;
            without a cost model a place costs nothing.

    Returns:
        A placement that reads at most as much as `none`. The heads of a rank are ascending.

    Raises:
        RaggedConfigError: an unknown mode, kept counts that are no multiples of UNIT, or ranks that do not divide the
            heads.
    """
    if mode not in MODES:
        raise RaggedConfigError(f"unknown placement {mode!r}; known: {', '.join(MODES)}")
    kept = _check_kept(kept, ranks, extra_places)
    if mode == "none" or ranks == 1:
        contiguous = np.arange(kept.shape[1]).reshape(ranks, -1)
        return _whole_heads(kept, np.broadcast_to(contiguous, (len(kept), *contiguous.shape)), mode)
    candidates = [_whole_heads(kept, np.stack([permute_layer(row, ranks) for row in kept]), mode)]
    if mode == "split" and extra_places > 0:
        # More than one extra place would not lower any load: `split_layer` reaches the mean with one.
        candidates.append(_split_heads(kept, ranks, mode))
    return _even_out(min(candidates, key=lambda placement: _step_bytes(placement, cost)))


def _check_kept(kept: np.ndarray, ranks: int, extra_places: int) -> np.ndarray:
    """Convert kept counts to int64.

    Raises:
        RaggedConfigError: no placement can be made from the arguments.
    """
    kept = np.asarray(kept, dtype=np.int64)
    if kept.ndim != 2 or kept.size == 0:
        raise RaggedConfigError(f"kept counts must be [layers, heads], got shape {kept.shape}")
    if (kept < UNIT).any() or (kept % UNIT).any():
        raise RaggedConfigError(f"kept counts must be positive multiples of {UNIT}")
    if ranks < 1 or kept.shape[1] % ranks:
        raise RaggedConfigError(
            f"{kept.shape[1]} heads cannot be placed on {ranks} ranks: use a number of ranks that divides them, or "
            f"--ragged-fairkv none with SGLang's replication of heads"
        )
    if extra_places < 0:
        raise RaggedConfigError(f"extra places per rank must be at least 0, not {extra_places}")
    return kept


def _whole_heads(kept: np.ndarray, heads: np.ndarray, mode: str) -> Placement:
    """Make a placement of whole heads from int [num_layers, ranks, places], every head once in each layer."""
    flat = heads.reshape(len(kept), -1)
    return Placement(heads=heads, kept=np.take_along_axis(kept, flat, axis=1).reshape(heads.shape), mode=mode)


def _split_heads(kept: np.ndarray, ranks: int, mode: str) -> Placement:
    layers = [split_layer(row, ranks) for row in kept // UNIT]
    heads = [[sorted(share) for share in shares] for shares in layers]
    units = [[[share[head] for head in sorted(share)] for share in shares] for shares in layers]
    return Placement(heads=np.array(heads), kept=np.array(units) * UNIT, mode=mode)


def _step_bytes(placement: Placement, cost: CostModel | None) -> float:
    return (
        float(placement.load.max(axis=1).sum()) if cost is None else cost.step_bytes(placement.load, placement.places)
    )


def _even_out(placement: Placement) -> Placement:
    """Permute the ranks of each layer so that the totals of the ranks over all layers are even.

    Layers are visited by falling spread; in each, the rank with the smallest total so far gets the largest load, and so
    on. Two totals then never differ by more than the largest spread D of a layer: if they differ by d <= D before a
    layer and by s <= D within it, they differ by |d - s| <= D after it. So the fullest rank has at most
    D * (ranks - 1) / ranks more than the mean.
    """
    load = placement.load
    total = np.zeros(placement.ranks)
    order = np.empty(load.shape, dtype=np.int64)
    for layer in np.argsort(-np.ptp(load, axis=1), kind="stable"):
        order[layer, np.argsort(total, kind="stable")] = np.argsort(-load[layer], kind="stable")
        total += load[layer, order[layer]]
    return replace(
        placement,
        heads=np.take_along_axis(placement.heads, order[:, :, None], axis=1),
        kept=np.take_along_axis(placement.kept, order[:, :, None], axis=1),
    )


def describe_placement(placement: Placement, kept: np.ndarray) -> str:
    """Return one line for the log: how busy ranks are in attention, with the placement and without.

    A layer takes as long as its fullest rank: busy is the mean load over the largest, summed over layers.

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

"""How evenly each mode of placement loads the ranks, in figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import MODES, plan_placement
from sgl_ragged.profiles.budgets import UNIT


@dataclass(frozen=True)
class Evenness:
    """One placement in figures. All of them are arithmetic on kept counts.

    `busy`: mean / largest load of the ranks, both summed over layers: the share of the time that a rank reads KV, if
    ranks wait for each other in every layer. `busy_worst`: the same of the worst layer. `busy_whole`: mean / largest
    of the ranks' loads over all layers (FairKV Eq. 5), as if ranks met once a step. `busy_net`: `busy`, with the
    weights of extra places counted as time lost. `busy_step`: bytes that a rank reads in a step, mean over the slowest,
    with all weights: what comes nearest to the busy rate that the paper measures. `capacity`: slots in the same bytes
    over those of mode `none`, where the rank with the largest slab sets the number for all. `extra_bytes`: weights of
    extra places, per rank. `speedup`: bytes of the slowest rank in a step under mode `none`, over those here
    (`CostModel.step_bytes`).
    """

    places: int
    busy: float
    busy_worst: float
    busy_whole: float
    busy_net: float
    busy_step: float
    capacity: float
    extra_bytes: int
    speedup: float


def evenness(placement: Placement, none: Placement, cost: CostModel) -> Evenness:
    """Figures of a placement beside that of mode `none` for the same heads and ranks."""
    load, whole = placement.load, placement.load.sum(axis=0)
    extra = (placement.places - none.places) * len(load) * cost.place_bytes
    useful, taken = (float(cost.kv_bytes(part).sum()) for part in (load.mean(axis=1), load.max(axis=1)))
    step = cost.step_bytes(load, placement.places)
    return Evenness(
        places=placement.places,
        busy=useful / taken,
        busy_worst=float((load.mean(axis=1) / load.max(axis=1)).min()),
        busy_whole=float(whole.mean() / whole.max()),
        busy_net=useful / (taken + extra),
        busy_step=1 - (taken - useful) / step,
        capacity=float(none.load.sum(axis=0).max() / whole.max()),
        extra_bytes=extra,
        speedup=cost.step_bytes(none.load, none.places) / step,
    )


def compare_modes(kept: np.ndarray, ranks: int, cost: CostModel) -> dict[str, Evenness]:
    """Every mode on the kept counts int [num_layers, num_heads], by name."""
    placements = {mode: plan_placement(kept, ranks, mode, cost=cost) for mode in MODES}
    return {mode: evenness(placement, placements["none"], cost) for mode, placement in placements.items()}


def busy_limit(kept: np.ndarray, ranks: int) -> float:
    """The highest `busy` with places in whole units: the fullest rank of a layer has the mean, rounded up."""
    load = kept.sum(axis=1)
    return float(load.sum() / ranks / (-(-load // (UNIT * ranks)) * UNIT).sum())

"""How evenly each mode of placement loads the ranks, in figures and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.fairkv.copying import MODES, place_any
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.profiles.budgets import UNIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def compare_modes(kept: np.ndarray, ranks: int, extra_places: int, cost: CostModel) -> dict[str, Evenness]:
    """Every mode on the kept counts int [num_layers, num_heads], by name."""
    placements = {mode: place_any(kept, ranks, mode, extra_places=extra_places, cost=cost) for mode in MODES}
    return {mode: evenness(placement, placements["none"], cost) for mode, placement in placements.items()}


def busy_limit(kept: np.ndarray, ranks: int) -> float:
    """The highest `busy` with places in whole units: the fullest rank of a layer has the mean, rounded up."""
    load = kept.sum(axis=1)
    return float(load.sum() / ranks / (-(-load // (UNIT * ranks)) * UNIT).sum())


def plot_modes(
    kept: np.ndarray, found: Mapping[int, Mapping[str, Evenness]], extra_places: int, cost: CostModel, title: str
) -> Figure:
    """Busy rate by mode and number of ranks, and the fullest rank of every layer for the largest number.

    Args:
        kept: int [num_layers, num_heads].
        found: ranks -> mode -> figures.
        extra_places, cost: those that `found` was made with.
        title: of the figure.
    """
    from matplotlib.figure import Figure  # takes seconds to import

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    bars, layers = figure.subplots(1, 2, width_ratios=(1, 1.4))
    draw_busy(bars, {ranks: {m: e.busy for m, e in modes.items()} for ranks, modes in found.items()})
    most = max(found)
    for mode in MODES:
        load = place_any(kept, most, mode, extra_places=extra_places, cost=cost).load
        layers.plot(load.max(axis=1) / load.mean(axis=1), linewidth=1.1, marker=".", markersize=4, label=mode)
    layers.axhline(1.0, color="black", linewidth=0.8)
    layers.set(xlabel="layer", ylabel=f"fullest / mean of {most} ranks", ylim=(0, None))
    layers.legend(fontsize="small")
    layers.grid(axis="y", alpha=0.3)
    return figure


def draw_busy(axes: Axes, busy: Mapping[int, Mapping[str, float]]) -> None:
    """Bars of busy rates: a group for each number of ranks, a bar for each mode."""
    modes: Sequence[str] = list(next(iter(busy.values())))
    width = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        at = np.arange(len(busy)) + (place - (len(modes) - 1) / 2) * width
        axes.bar(at, [rates[mode] for rates in busy.values()], width, label=mode)
    axes.set_xticks(np.arange(len(busy)), [f"TP{ranks}" for ranks in busy])
    axes.set(ylabel="busy: mean / largest load of the ranks", ylim=(0, 1.05))
    axes.legend(fontsize="small", loc="lower left")
    axes.grid(axis="y", alpha=0.3)

"""`sgl-ragged fairkv`: how evenly each mode loads the ranks, as tables, JSON or a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from sgl_ragged.budgets import UNIT
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import MODES, plan_placement
from sgl_ragged.model_options import add_model_options, choose_kept, read_sizes
from sgl_ragged.split_map_report import save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evenness:
    """One plan in figures. All of them are arithmetic on kept counts.

    `busy`: mean / largest load of the ranks, both summed over layers: the share of the time that a rank reads KV, if
    ranks wait for each other in every layer. `busy_worst`: the same of the worst layer. `busy_whole`: mean / largest
    of the ranks' loads over all layers (FairKV Eq. 5), as if ranks met once a step. `busy_net`: `busy`, with the
    weights of extra places counted as time lost. `busy_step`: bytes that a rank reads in a step, mean over the slowest,
    with all weights: what comes nearest to the busy rate that the paper measures. `capacity`: slots in the same bytes
    over those of mode `none`, where the rank with the largest slab sets the number for all. `extra_bytes`: weights of
    extra places, per rank. `speedup`: bytes of the slowest rank in a step under mode `none`, over those of this plan
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


def evenness(plan: Placement, none: Placement, cost: CostModel) -> Evenness:
    """Figures of a plan beside that of mode `none` for the same heads and ranks."""
    load, whole = plan.load, plan.load.sum(axis=0)
    extra = (plan.places - none.places) * len(load) * cost.place_bytes
    useful, taken = (float(cost.kv_bytes(part).sum()) for part in (load.mean(axis=1), load.max(axis=1)))
    step = cost.step_bytes(load, plan.places)
    return Evenness(
        places=plan.places,
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
    plans = {mode: plan_placement(kept, ranks, mode, extra_places=extra_places, cost=cost) for mode in MODES}
    return {mode: evenness(plan, plans["none"], cost) for mode, plan in plans.items()}


def busy_limit(kept: np.ndarray, ranks: int) -> float:
    """No plan with places in whole units has a higher `busy`: the fullest rank of a layer has the mean, rounded up."""
    load = kept.sum(axis=1)
    return float(load.sum() / ranks / (-(-load // (UNIT * ranks)) * UNIT).sum())


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `sgl-ragged`."""
    parser = commands.add_parser("fairkv", help="how evenly heads load tensor-parallel ranks, for a model on disk")
    add_model_options(parser)
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="ranks (default: those of 2, 4, 8 that divide)")
    parser.add_argument("--extra-places", type=int, default=1, help="per rank and layer, at most (default: 1)")
    parser.add_argument("--batch", type=int, default=32, help="requests decoded at once (default: 32)")
    parser.add_argument("--context", type=int, default=16384, help="tokens of each request (default: 16384)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw busy rates and the load of every rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=show_placements)


def show_placements(options: argparse.Namespace) -> None:
    """Print the comparison of modes for each number of ranks, and draw it if a file is given.

    Raises:
        RaggedConfigError: an option is out of range, or the ranks do not divide the heads.
    """
    geometry, chosen, kept = choose_kept(options)
    cost = read_sizes(
        options.model, lambda config: CostModel.from_config(config, options.segment, options.batch, options.context)
    )
    sizes = options.tp or [ranks for ranks in (2, 4, 8) if geometry.num_heads % ranks == 0]
    if not sizes:
        raise RaggedConfigError(f"none of 2, 4 and 8 ranks divide {geometry.num_heads} heads: say --tp")
    found = {ranks: compare_modes(kept, ranks, options.extra_places, cost) for ranks in sizes}
    if options.plot is not None:
        title = f"{options.model.name}, ratio {options.ratio:g}, segments of {options.segment}"
        save_plot(plot_modes(kept, found, options.extra_places, cost, title), options.plot)
    if options.json:
        by_ranks = {
            str(ranks): {"busy_limit": busy_limit(kept, ranks), "modes": {m: asdict(e) for m, e in modes.items()}}
            for ranks, modes in found.items()
        }
        print(json.dumps({"source": chosen.source, "cost": asdict(cost), "tp": by_ranks}))
        return
    console = Console()
    print(chosen.source)
    for ranks, modes in found.items():
        console.print(_table(modes, ranks, busy_limit(kept, ranks), cost))
    print(
        "busy: mean / largest load of the ranks over all layers, in the worst layer, of all layers together (FairKV\n"
        "Eq. 5), with extra weights as time lost, and of whole steps with all weights. capacity, speed-up: over none,\n"
        "by bytes. Arithmetic, not times."
    )
    if options.plot is not None:
        print(f"plot: {options.plot}")


def _table(modes: Mapping[str, Evenness], ranks: int, limit: float, cost: CostModel) -> Table:
    setting = f"batch {cost.batch}, context {cost.context}; no plan in units of {UNIT} tokens exceeds busy {limit:.3f}"
    table = Table(title=f"{ranks} ranks, {setting}", title_justify="left")
    table.add_column("mode", no_wrap=True)
    for name in ("places", "busy", "worst", "whole", "net", "step", "capacity", "extra MiB", "speed-up"):
        table.add_column(name, justify="right")
    for mode, entry in modes.items():
        figures = (entry.busy, entry.busy_worst, entry.busy_whole, entry.busy_net, entry.busy_step, entry.capacity)
        table.add_row(
            *(mode, str(entry.places), *(f"{figure:.3f}" for figure in figures)),
            *(f"{entry.extra_bytes / 2**20:.0f}", f"{entry.speedup:.3f}"),
        )
    return table


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
        load = plan_placement(kept, most, mode, extra_places=extra_places, cost=cost).load
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

"""Command `inspect --split-map`: how evenly each way of splitting heads loads the CTAs of decode attention.

All figures are arithmetic on kept counts, not times measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.model_options import add_model_options, choose_kept
from sgl_ragged.split_map import BALANCE, METHODS, imbalance, makespan, split_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MethodLoads:
    """One method on all layers.

    `counts`: int64 [num_layers, num_heads], CTAs of each head per request. `imbalance`, `makespan`: float64
    [num_layers], as in `sgl_ragged.split_map`.
    """

    counts: np.ndarray
    imbalance: np.ndarray
    makespan: np.ndarray

    @property
    def ctas(self) -> np.ndarray:
        """int64 [num_layers]: CTAs of each layer per request."""
        return self.counts.sum(axis=1)

    def summary(self) -> MethodSummary:
        """The method in seven numbers."""
        return MethodSummary(
            ctas_min=int(self.ctas.min()),
            ctas_median=float(np.median(self.ctas)),
            ctas_max=int(self.ctas.max()),
            imbalance_median=float(np.median(self.imbalance)),
            imbalance_worst=float(self.imbalance.max()),
            makespan_median=float(np.median(self.makespan)),
            makespan_worst=float(self.makespan.max()),
        )


@dataclass(frozen=True)
class MethodSummary:
    """CTAs per layer and request; largest / mean load of a CTA, and makespan over the least possible, over layers."""

    ctas_min: int
    ctas_median: float
    ctas_max: int
    imbalance_median: float
    imbalance_worst: float
    makespan_median: float
    makespan_worst: float


def compare_methods(
    kept: np.ndarray, batch: int, resident_ctas: int, heads_per_group: int = 1
) -> dict[str, MethodLoads]:
    """Every method on the kept counts int [num_layers, num_heads], by name, the simplest first."""
    loads = {}
    for method in reversed(METHODS):
        counts = split_counts(kept, resident_ctas, batch, method, heads_per_group)
        loads[method] = MethodLoads(counts, imbalance(kept, counts), makespan(kept, counts, batch, resident_ctas))
    return loads


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `sgl-ragged`."""
    parser = commands.add_parser("inspect", help="how decode attention is split, for a model on disk")
    add_model_options(parser)
    parser.add_argument("--split-map", action="store_true", help="CTAs per head and how evenly they are loaded")
    parser.add_argument("--batch", type=int, default=4, help="requests decoded at once (default: 4)")
    parser.add_argument("--sms", type=int, default=132, help="multiprocessors of the GPU (default: 132)")
    parser.add_argument("--ctas-per-sm", type=int, default=3, help="CTAs that each holds at once (default: 3)")
    parser.add_argument("--method", choices=METHODS, default="exact", help="shown per layer in --json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the load of every CTA: uniform, exact")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=show_split_map)


def show_split_map(options: argparse.Namespace) -> None:
    """Print the comparison of methods, and draw it if a file is given.

    Raises:
        RaggedConfigError: --split-map is not asked for, or an option is out of range.
    """
    if not options.split_map:
        raise RaggedConfigError("inspect what? add --split-map; `sgl-ragged layout` shows what a KV budget holds")
    for name in ("batch", "sms", "ctas_per_sm"):
        if getattr(options, name) < 1:
            raise RaggedConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    _, chosen, kept = choose_kept(options)
    resident = options.sms * options.ctas_per_sm
    loads = compare_methods(kept, options.batch, resident, options.heads_per_group)
    if options.plot is not None:
        title = f"{options.model.name}, ratio {options.ratio:g}, batch {options.batch} on {resident} resident CTAs"
        save_plot(plot_loads(kept, {name: loads[name].counts for name in ("uniform", "exact")}, title), options.plot)
    if options.json:
        setting = {"source": chosen.source, "batch": options.batch, "resident_ctas": resident, "method": options.method}
        methods = {name: asdict(entry.summary()) for name, entry in loads.items()}
        print(json.dumps(setting | {"methods": methods, "layers": _by_layer(kept, loads[options.method])}))
        return
    print(chosen.source)
    Console().print(_table(loads, options.batch, resident))
    if options.plot is not None:
        print(f"plot: {options.plot}")


def _by_layer(kept: np.ndarray, loads: MethodLoads) -> list[dict[str, object]]:
    columns = {"kept": kept, "counts": loads.counts, "imbalance": loads.imbalance, "makespan": loads.makespan}
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def _table(loads: Mapping[str, MethodLoads], batch: int, resident: int) -> Table:
    title = f"batch {batch} on {resident} resident CTAs: a wave holds {resident / batch:.4g} per request"
    caption = "load: largest / mean of a layer's CTAs; makespan: over the least possible. Arithmetic, not times."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("CTAs min", "max", "load median", "worst", "makespan median", "worst"):
        table.add_column(name, justify="right")
    for method, entry in loads.items():
        s = entry.summary()
        figures = (s.imbalance_median, s.imbalance_worst, s.makespan_median, s.makespan_worst)
        table.add_row(method, str(s.ctas_min), str(s.ctas_max), *(f"{figure:.3f}" for figure in figures))
    return table


def plot_loads(kept: np.ndarray, counts_by_method: Mapping[str, np.ndarray], title: str) -> Figure:
    """The load of every CTA of every layer, one panel a method.

    Args:
        kept: int [num_layers, num_heads].
        counts_by_method: method -> int [num_layers, num_heads].
        title: of the figure.
    """
    from matplotlib.figure import Figure  # takes seconds to import

    figure = Figure(figsize=(5.2 * len(counts_by_method), 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, len(counts_by_method), sharey=True, squeeze=False)[0]
    for axes, (method, counts) in zip(panels, counts_by_method.items(), strict=True):
        _draw_loads(axes, kept, counts)
        axes.set_title(f"{method}: worst layer {imbalance(kept, counts).max():.2f}", fontsize="medium")
    panels[0].set_ylabel("load of a CTA / mean load of its layer")
    panels[-1].legend(fontsize="small", loc="upper right")
    return figure


def _draw_loads(axes: Axes, kept: np.ndarray, counts: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    loads = kept / counts / (kept.sum(axis=1) / counts.sum(axis=1))[:, None]
    layers = np.broadcast_to(np.arange(len(kept))[:, None], kept.shape)
    axes.scatter(layers, loads, s=8 + 3 * counts, alpha=0.4, linewidths=0, label="the CTAs of a head (area: how many)")
    axes.plot(layers[:, 0], loads.max(axis=1), color="tab:red", linewidth=0.9, label="largest of the layer")
    axes.axhline(1.0, color="black", linewidth=0.9, label="all equal")
    axes.axhline(BALANCE, color="black", linewidth=0.8, linestyle="--", label=f"{BALANCE:g}, limit of exact")
    axes.set(xlabel="layer", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure; raises RaggedConfigError if the file cannot be written or its suffix names no image format."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RaggedConfigError(f"cannot write {path}: {error}") from None

"""How evenly each method of the CTA map loads the CTAs of decode attention.

All figures are arithmetic on kept counts, not times measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sgl_ragged.attention.cta_map import BALANCE, METHODS, cta_counts, imbalance, makespan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MethodLoads:
    """One method on all layers.

    `counts`: int64 [num_layers, num_heads], CTAs of each head per request. `imbalance`, `makespan`: float64
    [num_layers], as in `sgl_ragged.attention.cta_map`.
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


def compare_methods(kept: np.ndarray, batch: int, resident_ctas: int) -> dict[str, MethodLoads]:
    """Every method on the kept counts int [num_layers, num_heads], by name, the simplest first."""
    loads = {}
    for method in reversed(METHODS):
        counts = cta_counts(kept, resident_ctas, batch, method)
        loads[method] = MethodLoads(counts, imbalance(kept, counts), makespan(kept, counts, batch, resident_ctas))
    return loads


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

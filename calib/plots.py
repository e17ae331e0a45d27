"""Plots of a profile, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from calib.grouping import Reclaimed
from calib.role_report import RoleReport
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.slab_format import CODED_RATIO
from sgl_ragged.profiles.head_statistics import ROLES
from sgl_ragged.profiles.profile import Profile
from sgl_ragged.profiles.quality import LEAST_KL, MeasuredQuality

PANELS = 3
"""Number of layers in the retention plot: those whose budgets differ most."""


def write_plots(
    profile: Profile,
    kept: np.ndarray,
    segment: int,
    reclaimed: Sequence[Reclaimed],
    roles: RoleReport | None,
    folder: Path,
    suffix: str,
) -> tuple[Path, ...]:
    """Write the plots heatmap and grouping, and retention, coverage and roles if the profile has data for them.

    Args:
        kept: int64 [layers, heads], tokens per segment as served.
        segment: tokens per segment.
        roles: roles of heads, or None.
        folder: made if it does not exist.
        suffix: "png" or "svg".

    Returns:
        Paths of the plots.

    Raises:
        RaggedConfigError: the folder or a file in it cannot be written.
    """
    budgets = kept / segment
    figures = {"heatmap": plot_heatmap(budgets), "grouping": plot_grouping(reclaimed)}
    if profile.shares is not None and len(profile.shares) > 0:
        figures["retention"] = plot_retention(profile.shares, profile.tasks, budgets)
    if profile.coverage is not None:
        figures["coverage"] = plot_coverage(profile.coverage)
    if roles is not None:
        figures["roles"] = plot_roles(roles)
    paths = tuple(folder / f"{name}.{suffix}" for name in figures)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise RaggedConfigError(f"cannot write plots to {folder}: {error}") from None
    return paths


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png or .svg. Raises RaggedConfigError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise RaggedConfigError(f"cannot write the plot {path}: {error}") from None


def plot_quality(rows: Sequence[MeasuredQuality]) -> Figure:
    """Plot KL by kept share of the bytes, both in logarithms, with the default ratio marked."""
    figure = Figure(figsize=(5.0, 3.6))
    axes = figure.subplots()
    axes.plot([row.ratio for row in rows], [max(row.kl, LEAST_KL) for row in rows], "o-")
    for row in rows:
        axes.annotate(
            row.slab_dtype, (row.ratio, max(row.kl, LEAST_KL)), (4, 4), textcoords="offset points", fontsize=8
        )
    axes.axvline(CODED_RATIO, color="0.6", linestyle="--", label=f"default, {CODED_RATIO}")
    axes.set(xscale="log", yscale="log", xlabel="kept / full KV bytes", ylabel="KL to the uncompressed model, nats")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def plot_heatmap(budgets: np.ndarray) -> Figure:
    """Plot budgets as colours.

    Args:
        budgets: float [layers, heads], kept share of a segment as served.
    """
    layers, heads = budgets.shape
    figure = Figure(figsize=(max(4.0, 0.4 * heads + 2), max(3.0, 0.18 * layers + 1)))
    axes = figure.subplots()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    image = axes.imshow(budgets, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    axes.set(xlabel="head", ylabel="layer", title="kept share of a segment")
    axes.set_xticks(range(heads))
    figure.colorbar(image, ax=axes)
    return figure


def plot_retention(shares: np.ndarray, tasks: Sequence[str], budgets: np.ndarray) -> Figure:
    """Plot shares over samples against the reserved budget, heads sorted by budget (TANGRAM Fig. 5).

    Args:
        shares: float [samples, layers, heads].
        tasks: the task of each sample.
        budgets: float [layers, heads], as served.
    """
    order = np.argsort(-np.ptp(budgets, axis=1), kind="stable")
    layers = sorted(int(layer) for layer in order[:PANELS])
    figure = Figure(figsize=(4.0 * len(layers), 3.6))
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    for axes, layer in zip(panels, layers, strict=True):
        _draw_layer(axes, shares[:, layer], tasks, budgets[layer])
        axes.set(title=f"layer {layer}", xlabel="head, sorted by budget", ylim=(-2, 102))
    panels[0].set_ylabel("kept share, %")
    panels[0].legend(fontsize="small")
    return figure


def _draw_layer(axes: Axes, shares: np.ndarray, tasks: Sequence[str], budgets: np.ndarray) -> None:
    heads = np.argsort(budgets, kind="stable")
    columns = np.arange(1, len(heads) + 1)
    axes.boxplot(100 * shares[:, heads], positions=columns, widths=0.5, sym="", medianprops={"color": "0.3"})
    for task, marker in zip(sorted(set(tasks)), cycle("ov^Ds*"), strict=False):
        means = shares[[name == task for name in tasks]].mean(axis=0)
        axes.plot(columns, 100 * means[heads], marker, markersize=4, label=task)
    axes.step(columns, 100 * budgets[heads], where="mid", color="black", linestyle="--", label="budget as served")
    axes.set_xticks(columns, [str(head) for head in heads])


def plot_grouping(reclaimed: Sequence[Reclaimed]) -> Figure:
    """Plot the reclaimed share by heads per group, adjacent against clustered (TANGRAM Fig. 15)."""
    figure = Figure(figsize=(5.0, 3.6))
    axes = figure.subplots()
    for order, colour in (("clustered", "tab:blue"), ("adjacent", "tab:orange")):
        entries = [entry for entry in reclaimed if entry.order == order]
        sizes = [str(entry.heads_per_group) for entry in entries]
        axes.plot(sizes, [100 * e.served for e in entries], "o-", color=colour, label=f"{order}, as served")
        axes.plot(sizes, [100 * e.calibrated for e in entries], "x--", color=colour, label=f"{order}, as calibrated")
    axes.set(xlabel="heads per group", ylabel="reclaimed, % of the KV cache", ylim=(0, 100))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def plot_coverage(coverage: np.ndarray) -> Figure:
    """Plot the coverage curves [layers, heads, units] of all heads, coloured by layer."""
    layers, _, units = coverage.shape
    figure = Figure(figsize=(5.5, 3.6))
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis"]
    kept = np.arange(1, units + 1) / units
    for layer, curves in enumerate(coverage):
        axes.plot(kept, curves.T, color=colours(layer / max(layers - 1, 1)), alpha=0.5, linewidth=0.8)
    axes.set(xlabel="kept share of a segment", ylabel="mean peak attention covered", xlim=(0, 1), ylim=(0, None))
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, layers - 1), colours)
    figure.colorbar(scale, ax=axes, label="layer", ticks=MaxNLocator(integer=True))
    return figure


def plot_roles(roles: RoleReport) -> Figure:
    """Plot the share of each head's dropped attention that its best watcher foresees, and roles by their measures.

    The axes of the second panel are HeteroCache's stability and similarity (Fig. 1 c and d).
    """
    layers, heads = roles.heads[-1].layer + 1, roles.heads[-1].head + 1
    figure = Figure(figsize=(max(4.0, 0.4 * heads + 2) + 4.5, max(3.6, 0.18 * layers + 1)))
    foreseen, kinds = figure.subplots(1, 2, width_ratios=(max(4.0, 0.4 * heads + 2), 4.5))
    shares = np.array([np.nan if row.coverage is None else row.coverage for row in roles.heads])
    image = foreseen.imshow(
        shares.reshape(layers, heads), aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest"
    )
    for number, pivot in enumerate(roles.pivots, 1):
        foreseen.text(pivot.head, pivot.layer, str(number), ha="center", va="center", fontsize="small")
    foreseen.set(xlabel="head", ylabel="layer", title="foreseen, and pivots")
    foreseen.set_xticks(range(heads))
    foreseen.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=foreseen)
    for role, marker in zip(ROLES, "xo^s", strict=True):
        rows = [row for row in roles.heads if row.role == role]
        points = [row.similarity for row in rows], [row.stability for row in rows]
        kinds.plot(*points, marker, markersize=5, alpha=0.7, label=f"{role} ({len(rows)})")
    kinds.set(xlabel="similarity", ylabel="stability", xlim=(0, 1), ylim=(0, 1), title="roles")
    kinds.grid(alpha=0.3)
    kinds.legend(fontsize="small")
    return figure

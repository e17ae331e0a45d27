"""Accuracy by ratio, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cell import TOKEN, Cell, Key, Mean, by_key, mean_of

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_COLUMNS = 4


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Write the plot as PNG; nothing where there are no cells.

    One panel for each scorer, or, of one scorer and several tasks, the mean over them and one panel for each. A line
    for each kind of budgets, and the token pool as a dashed line with a band: its 95 % interval.
    """
    if not cells:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels(cells)
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    size = (max(4.0, 3.1 * columns), 2.8 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    budgets = list(dict.fromkeys(cell.budgets for cell in cells if cell.budgets is not None))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(budgets)}
    for axis, (title, own) in zip(axes.flat, shown, strict=False):
        _panel(axis, own, colours)
        axis.set_title(title, fontsize=9)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    # Of all panels: a scorer may lack some of the budgets.
    entries = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), fontsize=7, loc="outside lower center", ncols=_COLUMNS)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def panels(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """Titles, and the cells that each shows; the token pool's are in all."""
    scorers = list(dict.fromkeys(cell.scorer for cell in cells if cell.scorer is not None))
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    if len(scorers) > 1:
        return [(scorer, [cell for cell in cells if cell.scorer in (scorer, None)]) for scorer in scorers]
    if len(tasks) > 1:
        by_task = [(task, [cell for cell in cells if cell.task == task]) for task in tasks]
        return [(f"mean of {len(tasks)} tasks", list(cells)), *by_task]
    return [(f"{scorers[0]}: {tasks[0]}" if scorers else tasks[0], list(cells))]


def _panel(axis: Any, cells: Sequence[Cell], colours: dict[str, str]) -> None:
    means = {key: mean_of(own) for key, own in by_key(cells).items()}
    if TOKEN in means:
        token = means[TOKEN]
        axis.axhspan(token.low, token.high, color="#444444", alpha=0.12, linewidth=0)
        axis.axhline(token.score, color="#444444", linestyle=(0, (4, 3)), linewidth=1.2, label="token pool")
    for name, colour in colours.items():
        line = sorted((key.ratio, mean) for key, mean in _of_budgets(means, name) if key.ratio is not None)
        if not line:
            continue
        scores = [mean.score for _, mean in line]
        errors = [[mean.score - mean.low for _, mean in line], [mean.high - mean.score for _, mean in line]]
        places = [ratio for ratio, _ in line]
        axis.errorbar(places, scores, errors, color=colour, label=name, marker="o", capsize=2, ms=3, linewidth=1.4)
    ratios = sorted({key.ratio for key in means if key.ratio is not None})
    if ratios:
        axis.set(xticks=ratios, xlim=(ratios[0] - 0.04, ratios[-1] + 0.04))
    axis.tick_params(labelsize=8)
    axis.set(xlabel="ratio", ylim=(-0.03, 1.03))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _of_budgets(means: dict[Key, Mean], name: str) -> list[tuple[Key, Mean]]:
    return [(key, mean) for key, mean in means.items() if key.budgets == name]

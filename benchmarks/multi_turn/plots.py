"""The plots of a benchmark. Rejected points are in none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.pools import Pool
from benchmarks.multi_turn.measures import Figures
from benchmarks.multi_turn.point import Point
from benchmarks.multi_turn.summary import Cell, MedianRange, cells

PLOTS = {
    "ttft": "Time to first token by round: median of the requests of a round (line) and 95th percentile (dashes); "
    "median over runs, bars from the least to the greatest run.",
    "throughput": "Output tokens per second by number of clients; median over runs, bars from the least to the "
    "greatest run.",
    "cached": "Share of the prompt tokens that came from the cache, by round; median over runs, bars from the least "
    "to the greatest run.",
    "itl": "Time between tokens along the answers, median.",
    "kv": "Resident KV bytes over time, every run; the dashed line is what the pool takes.",
}
"""Names of the files, less suffix, and their captions."""


def colour(pool: str) -> Any:
    """Of a pool's lines; by its ratio, so that a pool looks the same in all plots."""
    from matplotlib import colormaps

    parsed = Pool.parse(pool)
    if parsed.ratio is None:
        return "#444444"
    return colormaps["viridis" if parsed.options else "plasma"](0.1 + 0.75 * (1 - parsed.ratio))


def draw(points: Sequence[Point], folder: Path) -> list[Path]:
    """Write all plots as SVG; none where no point counts. Returns their paths."""
    made = cells(points)
    if not any(cell.points for cell in made):
        return []
    import matplotlib

    matplotlib.use("Agg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "multi-turn"
    # Text as text: smaller files that can be searched.
    matplotlib.rcParams["svg.fonttype"] = "none"
    clients = sorted({cell.clients for cell in made if cell.points})
    colours = {cell.pool: colour(cell.pool) for cell in made}

    def of(count: int) -> list[Cell]:
        return [cell for cell in made if cell.clients == count and cell.points]

    def ttft(axis: Any, count: int) -> None:
        for cell in of(count):
            _line(axis, cell, lambda f: f.ttft_ms.p50, colours[cell.pool], cell.pool)
            _line(axis, cell, lambda f: f.ttft_ms.p95, colours[cell.pool], None, linestyle=(0, (4, 3)), alpha=0.6)
        axis.set(xlabel="round", ylabel="time to first token, ms", ylim=(0, None))

    def cached(axis: Any, count: int) -> None:
        for cell in of(count):
            _line(axis, cell, lambda f: f.cached_share, colours[cell.pool], cell.pool)
        axis.set(xlabel="round", ylabel="cached / prompt tokens", ylim=(0, 1))

    def kv(axis: Any, count: int) -> None:
        for cell in of(count):
            for number, point in enumerate(cell.points):
                axis.plot(
                    [sample.at_s for sample in point.samples],
                    [sample.kv_bytes / 2**20 for sample in point.samples],
                    color=colours[cell.pool],
                    linewidth=1.2,
                    alpha=0.75,
                    label=cell.pool if number == 0 else None,
                )
            axis.axhline(cell.kv_bytes / 2**20, color=colours[cell.pool], linewidth=0.8, linestyle=(0, (4, 3)))
        axis.set(xlabel="time, s", ylabel="resident KV, MiB", ylim=(0, None))

    def itl(axis: Any, count: int) -> None:
        for cell in of(count):
            row = [(number + 1, part) for number, part in enumerate(cell.itl_by_part())]
            _points(axis, row, colours[cell.pool], cell.pool)
        axis.set(xlabel="eighth of the answer", ylabel="time between tokens, ms", ylim=(0, None))

    paths = []
    for name, panel in (("ttft", ttft), ("cached", cached), ("kv", kv), ("itl", itl)):
        figure, axes = _figure(len(clients))
        for axis, count in zip(axes, clients, strict=True):
            panel(axis, count)
            _finish(axis, f"{count} clients")
        paths.append(_save(figure, folder / f"{name}.svg"))
    figure, (axis,) = _figure(1)
    highest = 0.0
    for pool, own_colour in colours.items():
        own = [cell for cell in made if cell.pool == pool and cell.points]
        row = [(cell.clients, cell.total(lambda f: f.output_tokens_per_s)) for cell in own]
        highest = max([highest, *(middle.high for _, middle in row)])
        _points(axis, row, own_colour, pool)
    axis.set(xlabel="clients", ylabel="output tokens / s", ylim=(0, 1.15 * highest), xticks=clients)
    _finish(axis, "throughput")
    paths.append(_save(figure, folder / "throughput.svg"))
    return paths


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(1.2 + 4.4 * panels, 3.4), squeeze=False, layout="constrained")
    return figure, axes[0]


def _line(
    axis: Any, cell: Cell, value: Callable[[Figures], float], colour: str, label: str | None, **style: Any
) -> None:
    _points(axis, [(number + 1, middle) for number, middle in cell.by_round(value).items()], colour, label, **style)


def _points(axis: Any, row: list[tuple[int, MedianRange]], colour: str, label: str | None, **style: Any) -> None:
    """A line of medians with bars from the least to the greatest run."""
    if not row:
        return
    errors = [[middle.median - middle.low for _, middle in row], [middle.high - middle.median for _, middle in row]]
    axis.errorbar(
        [x for x, _ in row],
        [middle.median for _, middle in row],
        errors,
        color=colour,
        label=label,
        marker="o",
        markersize=3.5,
        linewidth=1.5,
        capsize=2,
        elinewidth=0.8,
        **style,
    )


def _finish(axis: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_xlabel() == "round":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(fontsize=8, frameon=False)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path

"""Bars of TTFT by tier and pool."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import save_plot
from benchmarks.multi_turn.plots import colour
from benchmarks.returning.results import Results
from benchmarks.returning.visit import TIERS


def draw(results: Results, path: Path) -> None:
    """Medians as bars on a logarithmic scale, with lines from the least to the greatest. Raises RaggedConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = results.variants()
    figure, axis = pyplot.subplots(figsize=(8, 3.8), layout="constrained")
    width = 0.8 / max(len(variants), 1)
    for number, variant in enumerate(variants):
        found = [(place, results.ttft_s(variant, tier)) for place, tier in enumerate(TIERS)]
        bars = [
            (place + (number - (len(variants) - 1) / 2) * width, one.median, one.low, one.high)
            for place, one in found
            if one.median is not None and one.low is not None and one.high is not None
        ]
        plain, slash, _ = variant.partition("/")
        axis.bar(
            [x for x, *_ in bars],
            [1000 * middle for _, middle, _, _ in bars],
            0.92 * width,
            yerr=[
                [1000 * (middle - low) for _, middle, low, _ in bars],
                [1000 * (high - middle) for _, middle, _, high in bars],
            ],
            color=colour(plain),
            hatch="//" if slash else None,
            edgecolor="white",
            capsize=2,
            error_kw={"elinewidth": 0.8},
            label=variant,
        )
    axis.set_yscale("log")
    axis.set(xticks=range(len(TIERS)), xticklabels=TIERS, ylabel="time to first token, ms")
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=2)
    save_plot(figure, path)
    pyplot.close(figure)

"""Bars of TTFT by tier and pool."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import drawn
from benchmarks.multi_turn.plots import colour
from benchmarks.multi_turn.returning.results import Results
from benchmarks.multi_turn.returning.visit import TIERS
from benchmarks.multi_turn.summary import MedianRange


def draw(results: Results, path: Path) -> None:
    """Medians as bars on a logarithmic scale, with lines from the least to the greatest. Raises RaggedConfigError."""
    variants = results.variants()
    width = 0.8 / max(len(variants), 1)
    with drawn(path, (8, 3.8)) as axis:
        for number, variant in enumerate(variants):
            found = {tier: results.ttft_s(variant, tier) for tier in TIERS}
            bars = [
                (place + (number - (len(variants) - 1) / 2) * width, MedianRange.of(found[tier]))
                for place, tier in enumerate(TIERS)
                if found[tier]
            ]
            plain, slash, _ = variant.partition("/")
            axis.bar(
                [x for x, _ in bars],
                [1000 * one.median for _, one in bars],
                0.92 * width,
                yerr=[
                    [1000 * (one.median - one.low) for _, one in bars],
                    [1000 * (one.high - one.median) for _, one in bars],
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

"""KL by position in long texts: how the error grows with the length."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from benchmarks.pictures.chart import Axes, Scale, ticks
from benchmarks.pictures.svg import Drawing

RESULT = "benchmarks/results/quality-long-smollm2-135m-cpu.json"
LABELS = {"auto": ("fitted (default)", "ours"), "none": ("not fitted", "plain")}
GROUP = 4
"""Segments per point."""


def draw(root: Path) -> str:
    """Return the picture."""
    result = json.loads((root / RESULT).read_text())
    segment, length = result["settings"]["segment"], result["settings"]["text_tokens"]
    drawing = Drawing(
        340,
        f"KL to SGLang's pool by position in texts of {length:,} tokens, SmolLM2-135M at 0.1 of the bytes: it grows "
        "with the position, and is about twice as high throughout without fitting.",
    )
    axes = Axes(
        drawing,
        Scale(0, 8192, 64, 640, [(n, f"{n:,}") for n in range(0, 8193, 1024)]),
        Scale(0, 0.04, 280, 44, ticks((0, 0.01, 0.02, 0.03, 0.04))),
    )
    axes.grid(f"KL, SmolLM2-135M at 0.1 of the bytes, {result['settings']['texts']} texts", "position, tokens")
    for row in result["entries"].values():
        if row["configuration"]["ratio"] is None:
            continue
        texts = row["segments"]
        means = [mean(values) for values in zip(*texts, strict=True)]
        groups = [means[start : start + GROUP] for start in range(0, len(means), GROUP)]
        points = [(segment * (1 + GROUP * index + len(group) / 2), mean(group)) for index, group in enumerate(groups)]
        words, colour = LABELS[row["configuration"]["fit"]]
        axes.series(points, colour, hollow=colour == "plain")
        axes.label(points[-1], words, colour)
    return drawing.render()

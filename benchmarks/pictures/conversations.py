"""Conversations of many clients in the same KV bytes: throughput and cached share beside SGLang's pool."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.pictures.chart import Scale, ticks
from benchmarks.pictures.svg import Drawing

TABLE = "benchmarks/results/speed.md"
BESIDE, POOL = "token", "ragged@0.3"
TOP, PITCH = 58, 24
MODELS = (("Llama, 51M random weights", "-51m"), ("recall model", ""))
"""Headings, and the endings of names of traffic that was sent to each model."""


@dataclass(frozen=True)
class Row:
    """One traffic on both pools: output tokens per second, and the share of prompt tokens found in the cache."""

    traffic: str
    token_rate: float
    ragged_rate: float
    token_cached: int
    ragged_cached: int

    @property
    def gain(self) -> float:
        return self.ragged_rate / self.token_rate


def read_rows(text: str) -> list[Row]:
    """Read the table of the page: rows of traffic that both pools served, the greatest gain first."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 8 and re.fullmatch(r"\d+%", cells[7]):
            rate = float(cells[6].split(" ")[0].replace(",", ""))
            found.setdefault(cells[0], {})[cells[1]] = (rate, int(cells[7].removesuffix("%")))
    both = {traffic: pools for traffic, pools in found.items() if BESIDE in pools and POOL in pools}
    rows = [
        Row(traffic, pools[BESIDE][0], pools[POOL][0], pools[BESIDE][1], pools[POOL][1])
        for traffic, pools in both.items()
    ]
    return sorted(rows, key=lambda row: (-row.gain, row.traffic))


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Return rows by the heading of their model, without the ending of their names."""
    groups: dict[str, list[Row]] = {model: [] for model, _ in MODELS}
    for row in rows:
        model, ending = next((model, ending) for model, ending in MODELS if ending in row.traffic)
        words = row.traffic.replace(ending, "").replace("-", " ")
        groups[model].append(replace(row, traffic=words))
    return groups


def draw(root: Path) -> str:
    """Return the picture."""
    rows = read_rows((root / TABLE).read_text())
    groups = by_model(rows)
    bottom = TOP + PITCH * (len(rows) + len(groups))
    drawing = Drawing(
        bottom + 46,
        f"Conversations of many clients, ratio 0.3 beside SGLang's pool in the same KV bytes. Output tokens per second "
        f"are {rows[-1].gain:.1f} to {rows[0].gain:.1f} times SGLang's. The gain comes from a greater cached share; "
        "where SGLang's pool already holds everything there is little of it.",
    )
    most = max(row.gain for row in rows)
    rate = Scale(0, most + 0.2, 252, 500, ticks(range(math.floor(most) + 1)))
    cached = Scale(0, 100, 560, 780, ticks((0, 25, 50, 75, 100)))
    drawing.text(8, 26, "Traffic, clients", 13, bold=True)
    drawing.text(252, 26, "Output tokens/s, x SGLang's", 13, bold=True)
    drawing.text(560, 26, "Prompt tokens cached, %", 13, bold=True)
    for scale, unit in ((rate, "x"), (cached, "")):
        for value, label in scale.ticks:
            colour = "host" if scale is rate and value == 1 else "rule"
            drawing.line(scale(value), TOP - 12, scale(value), bottom - 4, colour, 1)
            drawing.text(scale(value), bottom + 14, label + unit, 12, "soft", "middle")
    y = TOP + 6
    for model, own in groups.items():
        drawing.text(8, y + 4, model, 12, "soft", bold=True)
        for place, row in enumerate(own, start=1):
            _row(drawing, y + place * PITCH, row, rate, cached)
        y += PITCH * (len(own) + 1)
    drawing.line(252, bottom + 34, 270, bottom + 34, "loss", 2)
    drawing.text(277, bottom + 38, "fewer cached than in SGLang's pool", 12, "loss")
    for x, words, colour in ((560, "SGLang's pool", "host"), (672, "ragged, ratio 0.3", "ours")):
        drawing.circle(x + 5, bottom + 34, 4, colour)
        drawing.text(x + 15, bottom + 38, words, 12, colour)
    return drawing.render()


def _row(drawing: Drawing, y: float, row: Row, rate: Scale, cached: Scale) -> None:
    drawing.text(8, y + 4, row.traffic, 12)
    drawing.rect(rate(0), y - 7, rate(row.gain) - rate(0), 14, "ours", radius=2)
    drawing.text(rate(row.gain) + 6, y + 4, f"{row.gain:.1f}", 12, bold=True)
    lost = row.ragged_cached < row.token_cached
    colour = "loss" if lost else "ours"
    drawing.line(cached(row.token_cached), y, cached(row.ragged_cached), y, colour, 2)
    drawing.circle(cached(row.token_cached), y, 4, "host")
    drawing.circle(cached(row.ragged_cached), y, 4, "ours")

"""Quality by bytes on SmolLM2-135M: KL to SGLang's pool, and facts known beside the methods of kvpress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.pictures.chart import Axes, Scale, log_scale, ticks
from benchmarks.pictures.svg import Drawing
from sgl_ragged.mem_pool.slab_format import AUTO as AUTO_FORMAT
from sgl_ragged.mem_pool.slab_format import settle_share

RESULTS = "benchmarks/results"
AUTO = "quality-auto-smollm2-135m-cpu.json"
FITTED = "quality-weighed-smollm2-135m-cpu.json"
CHOICE = "quality-smollm2-135m-cpu.json"
WIDTHS = "quality-slab-widths-smollm2-135m-cpu.json"
ASKED = 96
HEAD_DIM = 64
"""The model's."""

SHARES = (0.3, 0.2)
"""Shares of the bytes at which methods are compared: filled and hollow markers."""

FP8_SHARE = 0.5
"""Bytes of an FP8 cache / bytes of a 16-bit cache."""

Points = list[tuple[float, float]]
Entries = list[dict[str, Any]]


def draw(root: Path) -> str:
    """Return the picture."""
    results = {name: _entries(root / RESULTS / name) for name in (AUTO, FITTED, CHOICE, WIDTHS)}
    methods = _methods(results)
    height = max(400, 96 + 21 * len(methods))
    drawing = Drawing(
        height,
        "Left: KL divergence to SGLang's uncompressed pool by share of the bytes, on SmolLM2-135M. Fitted slabs in few "
        "bits, the default, are lowest at every share; schemes that quantise every token are above them. Right: facts "
        "known of 96 at 0.3 and 0.2 of the bytes. With calibration this plugin knows as many as the uncompressed pool "
        "and KVzip; other methods know fewer.",
    )
    _divergence(drawing, results)
    _facts(drawing, methods, _known(_served(results[FITTED], ratio=None)[0]))
    return drawing.render()


def _entries(path: Path) -> Entries:
    """Return the entries of a result file."""
    return list(json.loads(path.read_text())["entries"].values())


def _served(entries: Entries, **wanted: object) -> Entries:
    """Return entries of servers whose configuration has these values."""
    served = [entry for entry in entries if "configuration" in entry]
    return [one for one in served if wanted.items() <= one["configuration"].items()]


def _as_chosen(entries: Entries) -> Entries:
    """Return fitted servers whose slab format is what `auto` chooses at their ratio, of 16-bit caches."""
    fitted = _served(entries, fit="auto")
    chosen = [settle_share(AUTO_FORMAT, row["configuration"]["ratio"], HEAD_DIM, 2).form.name for row in fitted]
    return [row for row, name in zip(fitted, chosen, strict=True) if row["configuration"]["slabs"] == name]


def _curve(rows: Entries, scale: float = 1) -> Points:
    """Return KL by share of the bytes of a 16-bit cache, in order."""
    return sorted((row["configuration"]["ratio"] * scale, mean(row["texts"]["kl"])) for row in rows)


def _divergence(drawing: Drawing, results: dict[str, Entries]) -> None:
    fitted = _curve(_as_chosen(results[AUTO]))
    unfitted = _curve([row for row in _served(results[FITTED], fit="none") if row["configuration"]["slabs"] != "wide"])
    wide = _curve(_served(results[FITTED], slabs="wide", fit="auto"))
    keydiff = _curve(_served(results[CHOICE], scorer="keydiff", budgets="uniform"))
    cached = _served(results[CHOICE], cache="fp8_e4m3") + _served(results[WIDTHS], cache="fp8_e4m3")
    fp8 = _curve(cached, FP8_SHARE)
    peers = peer_curves(results[FITTED])
    axes = Axes(
        drawing,
        Scale(0.03, 0.55, 64, 370, ticks((0.05, 0.1, 0.2, 0.3, 0.4, 0.5))),
        log_scale(
            (kl for curve in (fitted, unfitted, wide, keydiff, fp8, *peers.values()) for _, kl in curve), 340, 44
        ),
    )
    axes.grid("KL to SGLang's distributions", "share of the bytes of a 16-bit cache")
    axes.series(unfitted, "ours", dashed=True, hollow=True)
    axes.series(wide, "fourth")
    axes.series(fp8, "host")
    axes.series(keydiff, "ours", hollow=True)
    axes.series(fitted, "ours")
    axes.label(fitted[-1], "default", "ours", 10, 4)
    axes.label(unfitted[0], "not fitted, 4 to 8 bits", "ours", 10, -4)
    axes.label(wide[-1], "wide slabs, fitted", "fourth", 8, 27)
    axes.label(fp8[-1], "FP8 cache", "host", 6, -15, "end")
    axes.label(keydiff[-1], "keydiff, equal budgets", "ours", 6, 22, "end")
    for method, curve in peers.items():
        axes.series(curve, "third", hollow=True)
        axes.label(curve[0], method, "third", -6, -7, "end")


def peer_curves(entries: Entries) -> dict[str, Points]:
    """Return KL by share of the bytes for each scheme that keeps every token, at all its numbers of bits.

    FP8 is left out: it is the curve of FP8 caches.
    """
    curves: dict[str, Points] = {}
    for entry in entries:
        if "peer" in entry and "kl" in entry["texts"]:
            scheme, _, bits = entry["peer"].rpartition("-")
            if bits.isdigit():
                curves.setdefault(scheme, []).append((entry["share"], mean(entry["texts"]["kl"])))
    return {method: sorted(curve) for method, curve in curves.items()}


def _known(result: dict[str, Any]) -> int:
    """Return the number of facts answered rightly."""
    return sum(sum(interview) for interviews in result["right"].values() for interview in interviews)


def _methods(results: dict[str, Entries]) -> list[tuple[str, bool, dict[float, int]]]:
    """Return name, whether it is this plugin's, and facts by share; the best at the first share come first."""
    ours = {
        "default": _as_chosen(results[AUTO]),
        "not fitted, wide slabs": _served(results[FITTED], fit="none", slabs="wide"),
        "keydiff, equal budgets": _served(results[CHOICE], scorer="keydiff", budgets="uniform"),
    }
    made = [(name, True, {row["configuration"]["ratio"]: _known(row) for row in rows}) for name, rows in ours.items()]
    peers: dict[str, dict[float, int]] = {}
    for entry in results[CHOICE]:
        if "peer" in entry:
            peers.setdefault(entry["peer"], {})[entry["share"]] = _known(entry)
    made += [(name, False, facts) for name, facts in peers.items()]
    listed = [row for row in made if set(SHARES) & set(row[2])]
    return sorted(listed, key=lambda row: ([-row[2].get(share, 0) for share in SHARES], row[0]))


def _facts(drawing: Drawing, methods: Sequence[tuple[str, bool, dict[float, int]]], reference: int) -> None:
    top = 52
    bottom = top + 21 * len(methods) - 6
    scale = Scale(0, ASKED, 590, 784, ticks((0, 24, 48, 72, 96)))
    drawing.text(420, 26, f"Facts known, of {ASKED}", 13, bold=True)
    for share, x in zip(SHARES, (600, 690), strict=True):
        drawing.circle(x, 22, 4, "soft" if share == SHARES[0] else None, "soft")
        drawing.text(x + 9, 26, f"{share:g} of bytes", 12, "soft")
    for value, label in scale.ticks:
        drawing.line(scale(value), top - 12, scale(value), bottom, "rule", 1)
        drawing.text(scale(value), bottom + 17, label, 12, "soft", "middle")
    drawing.line(scale(reference), top - 12, scale(reference), bottom, "host", 1.5, dashed=True)
    drawing.text(scale(reference) + 8, bottom + 34, f"uncompressed: {reference}", 12, "host", "end")
    for index, (name, is_ours, facts) in enumerate(methods):
        y, colour = top + index * 21, "ours" if is_ours else "third"
        drawing.text(576, y + 4, name, 12, colour, "end", bold=is_ours)
        points = [(scale(facts[share]), share) for share in SHARES if share in facts]
        if len(points) > 1:
            drawing.line(points[0][0], y, points[-1][0], y, colour, 1)
        for x, share in reversed(points):
            drawing.circle(x, y, 4, colour if share == SHARES[0] else None, colour)

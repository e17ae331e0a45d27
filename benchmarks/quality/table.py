"""The results as tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.quality.configuration import Configuration
from benchmarks.quality.facts import KINDS
from benchmarks.quality.store import Results


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error (nan for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.nan


def recall(result: dict[str, Any], kind: str) -> float:
    """Share of right answers (nan where nothing was asked)."""
    answers = [one for interview in result["right"][kind] for one in interview]
    return float(np.mean(answers)) if answers else np.nan


def continuation(results: Results, result: dict[str, Any]) -> tuple[float, float]:
    """Difference of the continuation's NLL to the token pool's, per text: mean and standard error."""
    reference = results.served[Configuration.token()]["texts"]["continuation_nll"]
    found = result["texts"]["continuation_nll"]
    return mean_and_error([a - b for a, b in zip(found, reference, strict=True)])


LONG = 8
"""Segments from which on a text is long enough to ask how KL goes with the position."""


def by_octave(segments: list[list[float]]) -> list[float]:
    """Mean over texts and over the segments of each octave of positions.

    Args:
        segments: a figure of each segment but the first, per text. The second is the first octave, two follow, then
            four, and so on; the last octave may be cut off.
    """
    means = np.mean(segments, axis=0)
    borders = 2 ** np.arange(len(means).bit_length())
    return [float(means[start - 1 : 2 * start - 1].mean()) for start in borders]


def show(results: Results, console: Console) -> None:
    """Tables: servers, servers by position where texts are long, and servers beside peers."""
    table = Table(title="Next-token distributions behind the first segment, against the token pool; facts known")
    columns = (
        "configuration",
        "KL",
        "KL at borders",
        "delta NLL",
        "top-1 same",
        *(f"recall, {kind}" for kind in KINDS),
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "configuration" else "right")
    for one, result in results.served.items():
        texts = result["texts"]
        cells = [f"{a:.4f} ± {e:.4f}" for a, e in (mean_and_error(texts[n]) for n in ("kl", "border_kl", "delta_nll"))]
        agrees = f"{mean_and_error(texts['agrees'])[0]:.3f}"
        table.add_row(str(one), *cells, agrees, *(f"{recall(result, kind):.3f}" for kind in KINDS))
    console.print(table)
    _show_positions(results, console)
    if not results.peers:
        return
    table = Table(title="Beside kvpress at the same kept share, question unknown: continuation and recall")
    for name in ("method", "share", "delta NLL", *(f"recall, {kind}" for kind in KINDS)):
        table.add_column(name, justify="left" if name == "method" else "right")
    rows = [(str(one), one.ratio, result) for one, result in results.served.items() if one.ratio is not None]
    rows += [(f"kvpress {method}", share, result) for (method, share), result in results.peers.items()]
    for name, share, result in sorted(rows, key=lambda row: -(row[1] or 0)):
        mean, error = continuation(results, result)
        table.add_row(name, f"{share:g}", f"{mean:.4f} ± {error:.4f}", *(f"{recall(result, k):.3f}" for k in KINDS))
    console.print(table)


def _show_positions(results: Results, console: Console) -> None:
    """KL by octave of the position, of servers on the ragged pool."""
    rows = {str(one): r["segments"] for one, r in results.served.items() if one.ratio is not None and "segments" in r}
    rows = {name: segments for name, segments in rows.items() if len(segments[0]) + 1 >= LONG}
    if not rows:
        return
    segment, length = results.settings["segment"], results.settings["text_tokens"]
    table = Table(title="KL by position, tokens")
    table.add_column("configuration")
    octaves = {name: by_octave(segments) for name, segments in rows.items()}
    for octave in range(max(map(len, octaves.values()))):
        table.add_column(f"{segment << octave} to {min(segment << octave + 1, length)}", justify="right")
    for name, means in octaves.items():
        table.add_row(name, *(f"{mean:.4f}" for mean in means))
    console.print(table)

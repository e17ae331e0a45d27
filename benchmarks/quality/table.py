"""The results as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.rows import Rows
from benchmarks.quality.configuration import Configuration
from benchmarks.quality.facts import KINDS
from benchmarks.quality.store import Results


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
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


def known(result: dict[str, Any], kind: str) -> str:
    """Right answers and how many were asked, empty where nothing was."""
    answers = [one for interview in result["right"][kind] for one in interview]
    return f"{sum(answers)} of {len(answers)}" if answers else ""


def tables(results: Results) -> list[Rows]:
    """Servers; servers by position where texts are long; servers beside peers where there are any."""
    made = [_servers(results)]
    made += [rows for rows in (_positions(results), _beside_peers(results)) if rows.rows]
    return made


def _servers(results: Results) -> Rows:
    columns = ("configuration", "KL", "KL at borders", "delta NLL", "top-1 same", "continuation, delta NLL", *KINDS)
    rows = []
    for one, result in results.served.items():
        texts = result["texts"]
        cells = [f"{a:.5f} ± {e:.5f}" for a, e in (mean_and_error(texts[n]) for n in ("kl", "border_kl", "delta_nll"))]
        cells.append(f"{mean_and_error(texts['agrees'])[0]:.3f}")
        cells.append(_continuation(results, result))
        rows.append((str(one), *cells, *(known(result, kind) for kind in KINDS)))
    title = "Next-token distributions behind the first segment, against the token pool; facts known"
    return Rows(title, columns, tuple(rows))


def _continuation(results: Results, result: dict[str, Any]) -> str:
    """Empty where no context was continued, or not by the token pool."""
    if Configuration.token() not in results.served or not result["texts"]["continuation_nll"]:
        return ""
    return "{:.4f} ± {:.4f}".format(*continuation(results, result))


def _beside_peers(results: Results) -> Rows:
    rows = [(str(one), one.ratio, result) for one, result in results.served.items() if one.ratio is not None]
    rows += [(f"kvpress {method}", share, result) for (method, share), result in results.peers.items()]
    made = []
    for name, share, result in sorted(rows, key=lambda row: -(row[1] or 0)) if results.peers else ():
        facts = (known(result, kind) for kind in KINDS)
        made.append((name, f"{share:g}", _continuation(results, result), *facts))
    title = "Beside kvpress at the same kept share, question unknown: continuation and facts known"
    return Rows(title, ("method", "share", "delta NLL", *KINDS), tuple(made))


def _positions(results: Results) -> Rows:
    """KL by octave of the position, of servers on the ragged pool."""
    rows = {str(one): r["segments"] for one, r in results.served.items() if one.ratio is not None and "segments" in r}
    octaves = {name: by_octave(found) for name, found in rows.items() if len(found[0]) + 1 >= LONG}
    segment, length = results.settings.get("segment", 0), results.settings.get("text_tokens", 0)
    columns = ["configuration"]
    for octave in range(max(map(len, octaves.values()), default=0)):
        columns.append(f"{segment << octave} to {min(segment << octave + 1, length)}")
    made = [(name, *(f"{mean:.4f}" for mean in means)) for name, means in octaves.items()]
    return Rows("KL by position, tokens", tuple(columns), tuple(made))

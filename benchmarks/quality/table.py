"""Results of servers and peers, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.results import Results
from benchmarks.harness.table import Table
from benchmarks.quality.configuration import Configuration
from benchmarks.quality.facts import KINDS
from benchmarks.quality.quantisers import SCHEMES

LONG = 8
"""Segments from which on a text is long enough to show KL by position."""


def served(results: Results) -> dict[Configuration, dict[str, Any]]:
    """Entries of servers, by configuration."""
    return {Configuration(**one["configuration"]): one for one in results.entries.values() if "configuration" in one}


def peers(results: Results) -> dict[tuple[str, float], dict[str, Any]]:
    """Entries of peers, by method and share."""
    return {(one["peer"], one["share"]): one for one in results.entries.values() if "peer" in one}


def peer_name(method: str) -> str:
    return method if method in SCHEMES else f"kvpress {method}"


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error (nan for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.nan


def continuation(results: Results, result: dict[str, Any]) -> tuple[float, float] | None:
    """Difference of the continuation's NLL to the token pool's: mean over texts and standard error; None without."""
    reference = served(results).get(Configuration.token())
    found = result["texts"]["continuation_nll"]
    if reference is None or not found:
        return None
    return mean_and_error([a - b for a, b in zip(found, reference["texts"]["continuation_nll"], strict=True)])


def by_octave(segments: list[list[float]]) -> list[float]:
    """Mean over texts and over the segments of each octave of positions.

    Args:
        segments: a figure of each segment but the first, per text. The second is the first octave, two follow, then
            four, and so on; the last octave may be cut off.
    """
    means = np.mean(segments, axis=0)
    borders = 2 ** np.arange(len(means).bit_length())
    return [float(means[start - 1 : 2 * start - 1].mean()) for start in borders]


def tables(results: Results) -> list[Table]:
    """Servers; servers by position if texts are long; servers and peers if there are any."""
    made = [_servers(results)]
    return made + [table for table in (_positions(results), _with_peers(results)) if table.rows]


def _servers(results: Results) -> Table:
    columns = ("configuration", "KL", "KL at borders", "delta NLL", "top-1 same", "continuation, delta NLL", *KINDS)
    rows = []
    named = {str(one): result for one, result in served(results).items()}
    named |= {
        f"{method}, {share:.3g} of the bytes": r for (method, share), r in peers(results).items() if method in SCHEMES
    }
    for name, result in named.items():
        texts = result["texts"]
        cells = ["{:.5f} ± {:.5f}".format(*mean_and_error(texts[name])) for name in ("kl", "border_kl", "delta_nll")]
        cells += [f"{np.mean(texts['agrees']):.3f}", _continuation(results, result)]
        rows.append((name, *cells, *(_known(result, kind) for kind in KINDS)))
    title = "Next-token distributions after the first segment, against the token pool; facts known"
    return Table(title, columns, rows)


def _known(result: dict[str, Any], kind: str) -> str:
    answers = [one for interview in result["right"][kind] for one in interview]
    return f"{sum(answers)} of {len(answers)}" if answers else ""


def _continuation(results: Results, result: dict[str, Any]) -> str:
    found = continuation(results, result)
    return "" if found is None else "{:.4f} ± {:.4f}".format(*found)


def _with_peers(results: Results) -> Table:
    methods = [(peer_name(method), share, result) for (method, share), result in peers(results).items()]
    own = [(str(one), one.ratio, result) for one, result in served(results).items() if one.ratio is not None]
    rows = [
        (name, f"{share:.3g}", _continuation(results, result), *(_known(result, kind) for kind in KINDS))
        for name, share, result in sorted([*own, *methods] if methods else [], key=lambda row: -row[1])
    ]
    title = "With peers, by kept share of the bytes, question unknown: continuation and facts known"
    return Table(title, ("method", "share", "delta NLL", *KINDS), rows)


def _positions(results: Results) -> Table:
    """KL by octave of the position, of servers on the ragged pool."""
    found = {str(one): r["segments"] for one, r in served(results).items() if one.ratio is not None and "segments" in r}
    octaves = {name: by_octave(segments) for name, segments in found.items() if len(segments[0]) + 1 >= LONG}
    segment, length = results.settings.get("segment", 0), results.settings.get("text_tokens", 0)
    columns = ["configuration"]
    for octave in range(max(map(len, octaves.values()), default=0)):
        columns.append(f"{segment << octave} to {min(segment << octave + 1, length)}")
    rows = [(name, *(f"{mean:.4f}" for mean in means)) for name, means in octaves.items()]
    return Table("KL by position, tokens", columns, rows)

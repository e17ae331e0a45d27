"""Sections for the results that are one JSON file each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import step_speed
from benchmarks.accuracy.store import Results
from benchmarks.accuracy.tables import tables
from benchmarks.harness.rows import Rows
from benchmarks.report.section import Figure, Section
from benchmarks.returning import tables as returning
from benchmarks.returning.results import Results as Returns
from benchmarks.returning.visit import TIGHT
from benchmarks.storm import results as storms
from benchmarks.tier_codecs.results import Result, table


@dataclass(frozen=True)
class Kind:
    """One kind of result file: which files, what they are, how they are made and how they are read."""

    pattern: str
    title: str
    text: str
    command: str
    tables: Callable[[Path, Any], list[Rows]]


def sections(results: Path) -> list[Section]:
    """All kinds in a fixed order; the section of a kind without a readable file says so."""
    made = [section(results, kind) for kind in KINDS]
    known = {path for kind in KINDS for path in results.glob(kind.pattern)}
    others = sorted(path.name for path in results.glob("*.json") if path not in known)
    if others:
        made.append(Section("Other files", text=("Not shown here: " + ", ".join(others) + ".",)))
    return made


def section(results: Path, kind: Kind) -> Section:
    """One section for all files of a kind, with the plots beside them."""
    paths = sorted(results.glob(kind.pattern))
    if not paths:
        return Section(kind.title, command=kind.command, missing=f"{results.name}/{kind.pattern} does not exist")
    made: list[Rows] = []
    broken: list[str] = []
    for path in paths:
        try:
            made += kind.tables(path, json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            broken.append(f"{path.name} cannot be read: {type(error).__name__} {error}")
    figures = [
        Figure(image, f"The table {path.stem} as a plot.")
        for path in paths
        for image in (path.with_suffix(".png"), path.with_suffix(".svg"))
        if image.is_file()
    ]
    text = f"{kind.text} Files: {', '.join(path.name for path in paths)}."
    return Section(kind.title, (text,), kind.command, tables=tuple(made), figures=tuple(figures), notes=tuple(broken))


def _demo(path: Path, data: Any) -> list[Rows]:
    """Per turn and pool: cached prompt tokens, time to first token, recall."""
    options, results = data["options"], data["results"]
    columns = ["turn"]
    for result in results:
        columns += [f"{result['pool']}: cached tokens", "TTFT ms, mean", "recall"]
    rows = []
    for turn in range(options["turns"]):
        cells = [str(turn + 1)]
        for result in results:
            own = [one for one in result["turns"] if one["turn"] == turn]
            cells += [
                f"{statistics.fmean(one['cached'] for one in own):.0f}",
                f"{1000 * statistics.fmean(one['ttft_s'] for one in own):.0f}",
                f"{statistics.fmean(one['right'] for one in own):.2f}",
            ]
        rows.append(tuple(cells))
    title = f"{path.stem}: {options['kv_bytes']} of KV for either pool, ratio {options['ratio']}"
    return [Rows(title, tuple(columns), tuple(rows))]


def _step_speed(path: Path, data: Any) -> list[Rows]:
    options = data["options"]
    title = f"{path.stem}: model {options['model']}, batch {options['batch']}, {options['context']} tokens of context"
    return [step_speed.table(data, title)]


def _accuracy(path: Path, data: Any) -> list[Rows]:
    """Scores by scorer, budgets and ratio, by task where there are several, and cached shares where they are known."""
    results = Results.from_json(path, data)
    made = tables(results.settings, results.cells)
    return [replace(rows, title=f"{path.stem}: {rows.title}") for rows in made]


def _returning(path: Path, data: Any) -> list[Rows]:
    found = Returns.from_json(path, data)
    made = [returning.by_tier(found), returning.restored_above_device(found)]
    if any(one.cell == TIGHT for one in found.visits):
        made.append(returning.tight(found))
    return [replace(rows, title=f"{path.stem}: {rows.title}") for rows in made]


def _cta_map(path: Path, data: Any) -> list[Rows]:
    names = ("ctas_median", "waves_median", "filled_median", "imbalance_median", "makespan_median", "makespan_worst")
    rows = [
        (row["method"], str(row["ratio"]), str(row["batch"]), *(f"{row[name]:g}" for name in names))
        for row in data["rows"]
    ]
    title = f"{path.stem}: arithmetic on kept counts, nothing timed"
    return [Rows(title, ("method", "ratio", "batch", *(name.replace("_", " ") for name in names)), tuple(rows))]


def _tier_codecs(path: Path, data: Any) -> list[Rows]:
    rows = table([Result(**one) for one in data["results"]])
    return [replace(rows, title=f"{path.stem}: {rows.title}")]


def _storm(path: Path, data: Any) -> list[Rows]:
    found = storms.Results.from_json(path, data)
    made = [storms.table(found), *([storms.refusal_table(found)] if found.refused else [])]
    return [replace(rows, title=f"{path.stem}: {rows.title}") for rows in made]


STEP_SPEED = Kind(
    "step-speed*.json",
    "Prefill and decode by pool",
    "Nothing cached (prefill), little new after a cached context (extend), one step of a batch (decode); all servers "
    "are up at once and take turns. At ratio 1 nothing is compressed: its ratio is what the pool itself costs. Ratios "
    "are medians over rounds, below 1 is faster than the token pool.",
    "python -m benchmarks.step_speed",
    _step_speed,
)

KINDS = (
    Kind(
        "demo*.json",
        "Demo: conversations held at once",
        "Facts of early turns are asked for in later ones, on either pool with the same KV bytes.",
        "python -m benchmarks.demo --json",
        _demo,
    ),
    STEP_SPEED,
    Kind(
        "return*.json",
        "Conversations that come back, by tier",
        "Time to first token of a conversation that paused: still on the device, evicted to the host, after a restart, "
        "and with no tier below the device; all pools with the same bytes on device and host. "
        "benchmarks/returning/README.md has more.",
        "python -m benchmarks.multi_turn --shape return",
        _returning,
    ),
    Kind(
        "accuracy*.json",
        "Accuracy by suite, scorer, budgets and ratio",
        "Mean score of answers to questions about long texts that are in the cache, with 95 % intervals; suites and "
        "metrics are in benchmarks/accuracy/README.md. * means that a server found nothing in its cache.",
        "python -m benchmarks.accuracy",
        _accuracy,
    ),
    Kind(
        "tier-codecs*.json",
        "What may be stored smaller in the host tier",
        "Contexts leave the device and come back through each codec; what follows is compared with the same on the "
        "device. Bytes are those of the tier; benchmarks/tier_codecs/README.md says what is measured.",
        "python -m benchmarks.tier_codecs",
        _tier_codecs,
    ),
    Kind(
        "storm*.json",
        "Storms: pairs of features under load",
        "Many clients on too small a pool, with requests that are left, aborted and retracted; what was answered is "
        "compared with a quiet server's. benchmarks/storm/README.md.",
        "python -m benchmarks.storm --pairs",
        _storm,
    ),
    Kind(
        "cta-map*.json",
        "How decode is divided among CTAs",
        "Makespan and imbalance of the methods of the CTA map on measured kept counts, in units of an ideal division.",
        "python -m benchmarks.cta_map",
        _cta_map,
    ),
)

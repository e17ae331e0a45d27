"""The kinds of results that are one JSON file each: what they are, how they are made and how they are read."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import open_blocks, step_speed
from benchmarks.accuracy import tables as accuracy
from benchmarks.accuracy.store import Results as Accuracy
from benchmarks.harness.result_file import ResultFile
from benchmarks.harness.rows import Rows
from benchmarks.multi_turn.returning import tables as returning
from benchmarks.multi_turn.returning.results import Results as Returns
from benchmarks.quality import table as quality
from benchmarks.quality.history import results as history
from benchmarks.quality.retrieval import results as retrieval
from benchmarks.quality.store import Results as Quality
from benchmarks.storm import results as storm
from benchmarks.tier_codecs.results import Result, table


@dataclass(frozen=True)
class Kind:
    """One kind of result file: which files, what they are, how they are made and how they are read.

    A file belongs to the first kind that has a pattern for it.
    """

    patterns: tuple[str, ...]
    title: str
    text: str
    command: str
    tables: Callable[[Path, Any], list[Rows]]


def _of(file: type[ResultFile], tables: Callable[[Any], list[Rows]]) -> Callable[[Path, Any], list[Rows]]:
    """Tables of a benchmark's own files, with the names of these in their titles."""

    def read(path: Path, data: Any) -> list[Rows]:
        return [replace(rows, title=f"{path.stem}: {rows.title}") for rows in tables(file.from_json(path, data))]

    return read


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
    drafts = step_speed.drafts_table(data, f"{path.stem}: drafts")
    return [step_speed.table(data, title), *([] if drafts is None else [drafts])]


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


def _open_blocks(path: Path, data: Any) -> list[Rows]:
    return [replace(rows, title=f"{path.stem}: {rows.title}") for rows in open_blocks.tables(data)]


def _krul(path: Path, data: Any) -> list[Rows]:
    rows = []
    for name, figures in data["results"].items():
        found = (quality.mean_and_error(figures[figure]) for figure in ("kl", "delta_nll"))
        rows.append((name, *(f"{mean:.2g} ± {error:.1g}" for mean, error in found)))
    title = f"{path.stem}: whole caches against the same with layers shared, {data['texts']} texts"
    return [Rows(title, ("variant", "KL", "delta NLL"), tuple(rows))]


def _fairkv(path: Path, data: Any) -> list[Rows]:
    """Minimum, median and maximum over profiles, by number of ranks and mode."""
    profiles, figures = list(data["profiles"].values()), ("busy", "busy_net", "capacity", "speedup")
    rows = []
    for ranks in profiles[0]:
        for mode in profiles[0][ranks]["modes"]:
            columns = [[profile[ranks]["modes"][mode][figure] for profile in profiles] for figure in figures]
            cells = (f"{min(c):.3f} / {np.median(c):.3f} / {max(c):.3f}" for c in columns)
            rows.append((f"TP{ranks}", mode, *cells))
    title = f"{path.stem}: {len(profiles)} profiles, arithmetic on kept counts, nothing timed"
    return [Rows(title, ("ranks", "mode", *(figure.replace("_", " ") for figure in figures)), tuple(rows))]


HEADLINE = ("quality-weighed-smollm2-135m-cpu.json", "quality-smollm2-135m-cpu.json")
"""Files of the README's table."""

STEP_SPEED = Kind(
    ("step-speed*.json",),
    "Prefill and decode by pool",
    "Nothing cached (prefill), little new after a cached context (extend), one step of a batch (decode); all servers "
    "are up at once and take turns. At ratio 1 nothing is compressed: its ratio is what the pool itself costs. Ratios "
    "are medians over rounds, below 1 is faster than the token pool.",
    "python -m benchmarks.step_speed",
    _step_speed,
)

KINDS = (
    Kind(
        HEADLINE,
        "Quality: the files of the README's table",
        "Default settings and, in the second file, methods of kvpress on the same contexts: distributions, "
        "continuations and facts known. Slabs are wide and unfitted where a configuration does not say otherwise. "
        "docs/evaluation.md says what is measured, docs/fitting.md and docs/evaluation.md what it shows.",
        "python -m benchmarks.quality",
        _of(Quality, quality.tables),
    ),
    Kind(
        ("demo*.json",),
        "Demo: conversations held at once",
        "Facts of early turns are asked for in later ones, on either pool with the same KV bytes.",
        "python -m benchmarks.demo --json",
        _demo,
    ),
    STEP_SPEED,
    Kind(
        ("return*.json",),
        "Conversations that come back, by tier",
        "Time to first token of a conversation that paused: still on the device, evicted to the host, after a restart, "
        "and with no tier below the device; all pools with the same bytes on device and host. "
        "benchmarks/multi_turn/returning/README.md has more.",
        "python -m benchmarks.multi_turn --shape return",
        _of(Returns, returning.all_of),
    ),
    Kind(
        ("accuracy*.json",),
        "Accuracy by suite, scorer, budgets and ratio",
        "Mean score of answers to questions about long texts that are in the cache, with 95 % intervals; suites and "
        "metrics are in benchmarks/accuracy/README.md. * means that a server found nothing in its cache.",
        "python -m benchmarks.accuracy",
        _of(Accuracy, lambda found: accuracy.tables(found.settings, found.cells)),
    ),
    Kind(
        ("tier-codecs*.json",),
        "What may be stored smaller in the host tier",
        "Contexts leave the device and come back through each codec; what follows is compared with the same on the "
        "device. Bytes are those of the tier; benchmarks/tier_codecs/README.md says what is measured.",
        "python -m benchmarks.tier_codecs",
        _tier_codecs,
    ),
    Kind(
        ("storm*.json",),
        "Storms: pairs of features under load",
        "Many clients on too small a pool, with requests that are left, aborted and retracted; what was answered is "
        "compared with a quiet server's. benchmarks/storm/README.md.",
        "python -m benchmarks.storm --pairs",
        _of(storm.Results, storm.tables),
    ),
    Kind(
        ("cta-map*.json",),
        "How decode is divided among CTAs",
        "Makespan and imbalance of the methods of the CTA map on measured kept counts, in units of an ideal division.",
        "python -m benchmarks.cta_map",
        _cta_map,
    ),
    Kind(
        ("quality*.json", "roles*.json"),
        "Quality by format, fitting, budgets and model",
        "The same measurements with other formats, fitted and unfitted, by other budgets, of Gemma 3 270M and of long "
        "texts: docs/slab-formats.md, docs/fitting.md, docs/calibration.md.",
        "python -m benchmarks.quality",
        _of(Quality, quality.tables),
    ),
    Kind(
        ("history*.json",),
        "What a bound on histories costs",
        "At ratio 1, so that the bound alone shows: docs/bounded-history.md.",
        "python -m benchmarks.quality --axis history",
        _of(history.Results, history.tables),
    ),
    Kind(
        ("retrieval*.json",),
        "What retrieval brings back",
        "Decoded texts with and without overlays: docs/retrieval.md, benchmarks/quality/retrieval/README.md.",
        "python -m benchmarks.quality --axis retrieval",
        _of(retrieval.Results, retrieval.tables),
    ),
    Kind(
        ("krul*.json",),
        "Sharing layers as it was published",
        "Whole caches in transformers, nothing dropped: benchmarks/tier_codecs/README.md.",
        "python -m benchmarks.tier_codecs.as_published",
        _krul,
    ),
    Kind(
        ("fairkv*.json",),
        "How evenly ranks are loaded",
        "Placements of heads on tensor-parallel ranks, over measured profiles: benchmarks/fairkv/README.md.",
        "python -m benchmarks.fairkv",
        _fairkv,
    ),
    Kind(
        ("open-blocks*.json",),
        "Full blocks of open segments in 8 bits",
        "What they would lose and save; nothing of it is built. Bytes are arithmetic: docs/decisions.md.",
        "python -m benchmarks.open_blocks",
        _open_blocks,
    ),
)

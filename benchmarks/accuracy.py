"""Recall through the server, for each scorer, with uniform and calibrated budgets, by ratio.

    python -m benchmarks.accuracy [--scorers keydiff ...] [--ratios 0.5 0.3 0.2 0.1]

Conversations of 2,049 tokens state facts; each fact is then asked for on its own, after the whole conversation. An
answer is one greedy token. Every cell is a server of its own; cells that the output file holds already are not run
again. Profiles that are missing are calibrated first. Writes JSON and a plot, prints a table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.stats import binomtest

from benchmarks.demo import MODEL
from benchmarks.launch import Server
from benchmarks.recall.questions import Interview, interviews
from benchmarks.recall.task import TOKEN_ID
from benchmarks.warm_start import Nursery
from sgl_ragged.scorers import get_scorer

SCORERS = ("keydiff", "expected_attention", "h2o", "snapkv", "tova", "value_key_norm", "key_norm", "streaming")
RATIOS = (0.5, 0.3, 0.2, 0.1)
BUDGETS = {
    "uniform": (),
    "implied": ("--method", "implied"),
    "implied-alpha0": ("--method", "implied", "--alpha", "0"),
    "implied-model": ("--method", "implied", "--scope", "model"),
    "coverage-all": ("--method", "coverage", "--queries", "all"),
    "coverage-layer": ("--method", "coverage", "--scope", "layer"),
    "coverage": ("--method", "coverage"),
}
"""Kinds of budgets, and what `python -m calib run` makes them with."""

DEFAULT_BUDGETS = ("uniform", "implied", "coverage-all", "coverage")
RESULTS = Path(__file__).parent / "results"
PROFILES = Path(__file__).parent / "recall" / "profiles"


@dataclass(frozen=True)
class Cell:
    """One server's answers. `mean_share` is what it said it keeps; low and high are Wilson's 95 % interval."""

    scorer: str
    budgets: str
    ratio: float
    segment: int
    right: int
    asked: int
    low: float
    high: float
    mean_share: float
    wall_s: float

    @property
    def recall(self) -> float:
        return self.right / self.asked


def ask(server: Server, talks: list[Interview]) -> tuple[int, int]:
    """Ask every question; returns right answers and questions."""
    right = asked = 0
    with httpx.Client(base_url=server.url, timeout=300) as client:
        for talk in talks:
            # Once alone, so that the questions find the conversation in the radix cache.
            _generate(client, [list(talk.history)])
            answers = _generate(client, [talk.prompt(fact) for fact in talk.facts])
            right += sum(answer == TOKEN_ID[fact.value] for answer, fact in zip(answers, talk.facts, strict=True))
            asked += len(answers)
    return right, asked


def _generate(client: httpx.Client, prompts: list[list[int]]) -> list[int]:
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    response = client.post("/generate", json=body)
    response.raise_for_status()
    return [answer["output_ids"][0] for answer in response.json()]


def profile_flags(scorer: str, budgets: str, folder: Path) -> list[str]:
    """Flags that give the server these budgets, and the scorer its statistics."""
    if budgets != "uniform":
        return ["--ragged-profile", str(folder / f"{scorer}-{budgets}.safetensors")]
    statistics = folder / f"{scorer}-coverage.safetensors"
    needs = ["--ragged-scorer-weights", str(statistics)] if get_scorer(scorer).statistics else []
    return ["--ragged-profile", "uniform", *needs]


def calibrate(scorers: list[str], budgets: list[str], options: argparse.Namespace) -> None:
    """Make the profiles that are missing; all methods share one set of recordings."""
    kinds = [kind for kind in budgets if kind != "uniform"]
    if "uniform" in budgets and "coverage" not in kinds and any(get_scorer(s).statistics for s in scorers):
        kinds.append("coverage")
    if all((options.profiles / f"{s}-{k}.safetensors").is_file() for s in scorers for k in kinds):
        return
    options.profiles.mkdir(parents=True, exist_ok=True)
    data = options.profiles / "samples.jsonl"
    with data.open("w") as file:
        subprocess.run([sys.executable, "-m", "benchmarks.recall.samples"], stdout=file, check=True)
    # Recordings belong to the scorers that they were made for.
    work = options.profiles / "-".join(["recordings", *scorers])
    command = [sys.executable, "-m", "calib", "run", "--model", str(MODEL), "--dtype", "float32", "--data", str(data)]
    command += ["--segment", str(options.segment), "--ratio", str(options.calibrate_at), "--work", str(work)]
    command += ["--scorer", *scorers]
    for kind in kinds:
        target = options.profiles / f"{{scorer}}-{kind}.safetensors"
        subprocess.run([*command, *BUDGETS[kind], "-o", str(target)], check=True, stdout=subprocess.DEVNULL)


def run_cell(
    nursery: Nursery, key: tuple[str, str, float], options: argparse.Namespace, talks: list[Interview]
) -> Cell:
    """Start a server, ask, stop it."""
    scorer, budgets, ratio = key
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "160MiB", "--max-running-requests", "10"]
    flags += ["--kv-pool", "ragged", "--ragged-segment", str(options.segment), "--ragged-ratio", str(ratio)]
    flags += ["--ragged-scorer", scorer, *profile_flags(scorer, budgets, options.profiles)]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with nursery.serve(MODEL, *flags, log=Path(folder) / "server.log") as server:
            right, asked = ask(server, talks)
            found = re.search(r"mean share ([0-9.]+)", server.log_text())
        interval = binomtest(right, asked).proportion_ci(method="wilson")
        share = float(found.group(1)) if found else float("nan")
        wall_s = round(time.perf_counter() - started, 1)
    low, high = round(interval.low, 4), round(interval.high, 4)
    return Cell(scorer, budgets, ratio, options.segment, right, asked, low, high, share, wall_s)


def show(cells: list[Cell], console: Console) -> None:
    """One row per scorer and budgets, one column per ratio."""
    ratios = sorted({cell.ratio for cell in cells}, reverse=True)
    table = Table(title="recall through the server (95 % interval)")
    for column in ("scorer", "budgets", *(f"ratio {ratio}" for ratio in ratios)):
        table.add_column(column, justify="left" if column in ("scorer", "budgets") else "right")
    by_key = {(cell.scorer, cell.budgets, cell.ratio): cell for cell in cells}
    for scorer in dict.fromkeys(cell.scorer for cell in cells):
        for budgets in BUDGETS:
            row = [by_key.get((scorer, budgets, ratio)) for ratio in ratios]
            if any(row):
                texts = [f"{c.recall:.3f} ({c.low:.2f}-{c.high:.2f})" if c else "" for c in row]
                table.add_row(scorer, budgets, *texts)
        table.add_section()
    console.print(table)


def plot(cells: list[Cell], path: Path) -> None:
    """Recall by ratio, one panel per scorer, one line per kind of budgets, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scorers = list(dict.fromkeys(cell.scorer for cell in cells))
    columns = min(4, len(scorers))
    rows = -(-len(scorers) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.6 * rows), sharey=True, squeeze=False)
    for axis, scorer in zip(axes.flat, scorers, strict=False):
        for budgets in BUDGETS:
            line = sorted((c for c in cells if (c.scorer, c.budgets) == (scorer, budgets)), key=lambda c: c.ratio)
            if not line:
                continue
            errors = [[c.recall - c.low for c in line], [c.high - c.recall for c in line]]
            axis.errorbar(
                [c.ratio for c in line], [c.recall for c in line], errors, label=budgets, marker="o", capsize=2, ms=3
            )
        axis.set_title(scorer, fontsize=9)
        axis.set_xlabel("ratio")
        axis.set_ylim(0, 1.03)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(scorers) :]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("recall")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorers", nargs="+", default=list(SCORERS), metavar="NAME")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), metavar="R")
    parser.add_argument(
        "--budgets", nargs="+", choices=BUDGETS, default=list(DEFAULT_BUDGETS), metavar="KIND", help=", ".join(BUDGETS)
    )
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of SCORER-KIND.safetensors")
    parser.add_argument("--calibrate-at", type=float, default=0.3, metavar="R", help="ratio of new profiles [0.3]")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--questions", type=int, default=10, help="of each conversation [10]")
    parser.add_argument("--seed", type=int, default=2**34)
    parser.add_argument("--output", type=Path, default=RESULTS / "accuracy-cpu.json", help="also .png beside it")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    options = parser.parse_args()
    calibrate(options.scorers, options.budgets, options)
    talks = interviews(options.conversations, options.questions, seed=options.seed)
    cells = []
    if options.output.is_file():
        cells = [Cell(**cell) for cell in json.loads(options.output.read_text())["cells"]]
    known = {(cell.scorer, cell.budgets, cell.ratio) for cell in cells if cell.segment == options.segment}
    # At ratio 1 nothing is compressed: the figure that the others are held against.
    wanted = [("keydiff", "uniform", 1.0)]
    wanted += [(s, b, r) for s in options.scorers for b in options.budgets for r in options.ratios]
    missing = [key for key in wanted if key not in known]
    console = Console(stderr=options.json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, Nursery() as nursery:
        task = progress.add_task("servers", total=len(missing))
        for key in missing:
            progress.update(task, description=" ".join(map(str, key)))
            cells.append(run_cell(nursery, key, options, talks))
            settings = {name: getattr(options, name) for name in ("conversations", "questions", "seed")}
            document = {"settings": settings, "cells": [asdict(cell) for cell in cells]}
            options.output.write_text(json.dumps(document, indent=1) + "\n")
            progress.advance(task)
    plot(cells, options.output.with_suffix(".png"))
    if options.json:
        print(options.output.read_text(), end="")
    else:
        show(cells, console)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

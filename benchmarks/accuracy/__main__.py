"""Accuracy of the recall model through the server, on SGLang's pool and on the ragged one.

    python -m benchmarks accuracy [--scorer keydiff ..] [--budgets uniform coverage ..] [--ratio 0.5 0.3 0.2 0.1]

Facts of long conversations in the recall model's language, asked for with the conversation in the cache. Every cell is
a server of its own; cells that the output file holds are not run again. Prints tables, writes JSON.
benchmarks/accuracy/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.accuracy import budgets
from benchmarks.accuracy.cells import TOKEN, Cell, Key, cell_of, notes, tables
from benchmarks.accuracy.conversations import ask, conversations_at_once, longest_prompt
from benchmarks.harness import machine
from benchmarks.harness.command import command
from benchmarks.harness.errors import PointFailed, SettingsError
from benchmarks.harness.options import check_counts, flags, new_parser
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.recall import MODEL
from benchmarks.recall.questions import Interview, interviews
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.profiles.budgets import check_budgets
from sgl_ragged.scorers import get_scorer

SCORERS = ("keydiff", "expected_attention", "h2o", "snapkv", "tova", "value_key_norm", "key_norm", "streaming")
KINDS = ("uniform", "coverage-all", "coverage")
RATIOS = (0.5, 0.3, 0.2, 0.1)

SETTINGS = ("conversations", "questions", "seed", "segment", "kv_bytes", "max_running_requests", "ragged_args")
"""Options that cells of one file share. Budgets of a server are in its cell."""


def parser() -> argparse.ArgumentParser:
    made = new_parser("accuracy", __doc__)
    made.add_argument("--conversations", type=int, default=20, help="[20]")
    made.add_argument("--questions", type=int, default=10, help="of each conversation [10]")
    made.add_argument("--seed", type=int, default=2**34, help="of the conversations [2**34]")
    made.add_argument("--ratio", nargs="+", type=float, metavar="R", default=list(RATIOS), help="[0.5 0.3 0.2 0.1]")
    made.add_argument("--scorer", nargs="+", metavar="NAME", default=list(SCORERS), help="[eight]")
    text = f"uniform, auto, a profile FILE in whose name {{scorer}} is replaced, or {', '.join(budgets.CALIBRATED)}"
    made.add_argument("--budgets", nargs="+", metavar="B", default=list(KINDS), help=f"{text} [{' '.join(KINDS)}]")
    made.add_argument("--segment", type=int, default=256, metavar="S", help="[256]")
    made.add_argument("--kv-bytes", default="160MiB", help="KV budget of every server [160MiB]")
    made.add_argument("--max-running-requests", type=int, default=10, metavar="N", help="conversations at once [10]")
    made.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged servers")
    made.add_argument("--output", type=Path, metavar="FILE.json", default=Path("accuracy.json"), help="[accuracy.json]")
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises SettingsError or RaggedConfigError for options that no server takes."""
    check_counts(options, "conversations", "questions", "max_running_requests")
    parse_bytes(options.kv_bytes)
    for ratio in options.ratio:
        check_budgets(ratio, options.segment)
    for scorer in options.scorer:
        get_scorer(scorer)
    for name in ("ratio", "scorer"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            raise SettingsError(f"{flags([name])}: each value once")
    budgets.check_names(options.budgets, options.scorer)


def keys_of(options: argparse.Namespace) -> dict[Key, str]:
    """List the servers in their order, each with its value of --budgets; the token pool has none."""
    keys = {TOKEN: ""}
    for scorer in options.scorer:
        for name in options.budgets:
            keys |= {Key("ragged", scorer, budgets.label(name), ratio): name for ratio in options.ratio}
    return keys


def measure(
    key: Key,
    name: str,
    servers: Started,
    talks: Sequence[Interview],
    options: argparse.Namespace,
    finished: str,
    progress: Progress,
) -> Cell:
    """Ask one server every question.

    Args:
        name: value of --budgets.
        finished: what is known so far, for the message of a server that is lost.

    Raises:
        ServerLost: the server went away.
        SettingsError: it does not start, or does not take the prompts.
    """
    log, bar = options.output.with_suffix(".log"), progress.add_task(str(key), total=len(talks) * options.questions)
    began = time.perf_counter()
    own: list[str] = []
    if key.scorer is not None:
        own = [
            "--ragged-scorer",
            key.scorer,
            "--ragged-segment",
            str(options.segment),
            *budgets.flags(key.scorer, name),
        ]
    with (
        naming(str(key), log, finished),
        servers.client(Pool(key.ratio), options.max_running_requests, log, own) as client,
    ):
        longest, most = longest_prompt(talks), client.longest_prompt() - 1
        if longest > most:
            raise SettingsError(
                f"the server of {key} takes prompts of {most} tokens, and the longest has {longest}: more --kv-bytes"
            )
        at_once = conversations_at_once(talks, client.pool_tokens(), options.max_running_requests, options.segment)
        try:
            answered = ask(client, talks, at_once, lambda: progress.advance(bar))
        except PointFailed:
            client.check_alive()
            raise
        info = client.ragged()
    log.unlink(missing_ok=True)
    progress.remove_task(bar)
    wall_s = round(time.perf_counter() - began, 1)
    share, profile = info.get("kept_ratio"), info.get("profile_source")
    return cell_of(key, answered, mean_share=share, profile=profile, wall_s=wall_s)


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError and RaggedConfigError."""
    check(options)
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= machine.model_settings(str(MODEL)) | {"machine": machine.describe()}
    results = Results.open(options.output, "accuracy", settings)
    wanted = keys_of(options)
    missing = {key: name for key, name in wanted.items() if str(key) not in results.entries}
    console = Console(stderr=options.json)
    if missing:
        talks = interviews(options.conversations, options.questions, seed=options.seed)
        scorers = [scorer for scorer in options.scorer if any(key.scorer == scorer for key in missing)]
        budgets.calibrate(scorers, options.budgets, options.segment)
        with (
            Started(str(MODEL), options.kv_bytes, (), shlex.split(options.ragged_args)) as servers,
            bars(console) as progress,
        ):
            bar = progress.add_task("servers", total=len(missing))
            for done, (key, name) in enumerate(missing.items(), start=len(wanted) - len(missing)):
                finished = f"{done} of {len(wanted)} servers are finished, their cells are in {results.path}"
                results.add(str(key), measure(key, name, servers, talks, options, finished, progress))
                progress.advance(bar)
    cells = list(results.as_kind(Cell).values())
    results.show(tables(results.settings, cells), console, as_json=options.json)
    for line in notes(cells):
        console.print(line, style="red", highlight=False, soft_wrap=True)
    console.print(f"cells: {options.output}", highlight=False, soft_wrap=True)


def main() -> None:
    options = parser().parse_args()
    with command("accuracy"):
        run(options)


if __name__ == "__main__":
    main()

"""Accuracy through the server, on SGLang's pool and on the ragged one, by scorer, budgets and ratio.

    python -m benchmarks accuracy [--scorer keydiff ..] [--ratio 0.5 0.3 0.2 0.1]

Facts of long conversations in the recall model's language, asked for with the conversation in the cache. Every cell is
a server of its own; cells that the output file holds are not run again. Prints tables, writes JSON.
benchmarks/accuracy/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.accuracy import budgets
from benchmarks.accuracy.cells import TOKEN, Cell, Key, cell_of, notes, tables
from benchmarks.accuracy.conversations import MODES, Answered, ask, conversations_at_once, prompts
from benchmarks.harness import machine
from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.errors import PointFailed, SettingsError
from benchmarks.harness.options import check_counts, flags, new_parser
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.recall import MODEL
from benchmarks.recall.questions import Interview, interviews
from benchmarks.recall.task import VOCABULARY
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.profiles.budgets import check_budgets, check_segment
from sgl_ragged.scorers import get_scorer

SCORERS = ("keydiff", "expected_attention", "h2o", "snapkv", "tova", "value_key_norm", "key_norm", "streaming")
KINDS = ("uniform", "coverage-all", "coverage")
RATIOS = (0.5, 0.3, 0.2, 0.1)

SETTINGS = ("conversations", "questions", "seed", "mode", "segment", "kv_bytes", "max_running_requests")
SETTINGS += ("server_args", "ragged_args")
"""Options that cells of one file share. The profile of a server is in its cell."""

OWN_FLAGS = {
    **{name: "--model" for name in ("--model-path", "--model")},
    **{name: name for name in ("--kv-bytes", "--max-running-requests")},
    **{f"--ragged-{name}": f"--{name}" for name in ("ratio", "segment", "scorer")},
    "--kv-pool": "--pool",
    "--ragged-profile": "--budgets",
}
"""Flags of a server that have an option here; given as server flags, they would give cells wrong names."""


def parser() -> argparse.ArgumentParser:
    made = new_parser("accuracy", __doc__)
    made.add_argument("--conversations", type=int, default=20, help="[20]")
    made.add_argument("--questions", type=int, default=10, help="of each conversation [10]")
    made.add_argument("--seed", type=int, default=2**34, help="of the conversations [2**34]")
    made.add_argument("--mode", choices=MODES, default=MODES[0], help=f"[{MODES[0]}]")
    made.add_argument("--model", metavar="FOLDER", default=str(MODEL), help="[the recall model]")
    made.add_argument("--pool", nargs="+", choices=("token", "ragged"), default=["token", "ragged"], help="[both]")
    made.add_argument("--ratio", nargs="+", type=float, metavar="R", default=list(RATIOS), help="[0.5 0.3 0.2 0.1]")
    made.add_argument("--scorer", nargs="+", metavar="NAME", default=list(SCORERS), help="[eight]")
    text = f"uniform, auto, a profile FILE in whose name {{scorer}} is replaced, or {', '.join(budgets.CALIBRATED)}"
    made.add_argument("--budgets", nargs="+", metavar="B", default=list(KINDS), help=f"{text} [{' '.join(KINDS)}]")
    made.add_argument("--segment", type=int, default=256, metavar="S", help="[256]")
    made.add_argument("--profiles", type=Path, default=budgets.PROFILES, help="folder of SCORER-KIND.safetensors")
    made.add_argument("--calibrate-at", type=float, metavar="R", default=0.3, help="ratio of new profiles [0.3]")
    made.add_argument("--kv-bytes", default="160MiB", help="KV budget of every server [160MiB]")
    made.add_argument("--max-running-requests", type=int, default=10, metavar="N", help="conversations at once [10]")
    made.add_argument("--server-args", default="", metavar="TEXT", help="further flags of all servers")
    made.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged ones")
    made.add_argument("--output", type=Path, metavar="FILE.json", default=Path("accuracy.json"), help="[accuracy.json]")
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises SettingsError for options that do not go together, and numbers out of range."""
    check_counts(options, "conversations", "questions", "max_running_requests")
    if options.seed < 0:
        raise SettingsError("--seed must not be negative")
    try:
        parse_bytes(options.kv_bytes)
        check_segment(options.segment)
        for ratio in (*options.ratio, options.calibrate_at):
            check_budgets(ratio, options.segment)
        for scorer in options.scorer:
            get_scorer(scorer)
    except RaggedConfigError as error:
        raise SettingsError(str(error)) from None
    for name in ("pool", "ratio", "scorer"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            raise SettingsError(f"{flags([name])}: each value once")
    budgets.check_names(options.budgets, options.scorer, options.model)
    for name in ("server_args", "ragged_args"):
        try:
            given = shlex.split(getattr(options, name))
        except ValueError as error:
            raise SettingsError(f"{flags([name])}: {error}") from None
        for flag in (text.partition("=")[0] for text in given):
            if flag in OWN_FLAGS:
                raise SettingsError(f"{flags([name])}: {flag} is set by {OWN_FLAGS[flag]}")
    from transformers import AutoTokenizer

    # One token for each word: prompts are token ids.
    ids = AutoTokenizer.from_pretrained(options.model)(" ".join(VOCABULARY), add_special_tokens=False).input_ids
    if list(ids) != list(range(len(VOCABULARY))):
        raise SettingsError(f"--model {options.model} does not have the words of the recall model's language")


def keys_of(options: argparse.Namespace) -> dict[Key, str]:
    """List the servers in their order, each with its value of --budgets; the token pool has none."""
    keys = {TOKEN: ""} if "token" in options.pool else {}
    if "ragged" in options.pool:
        for scorer in options.scorer:
            for name in options.budgets:
                keys |= {Key("ragged", scorer, budgets.label(name), ratio): name for ratio in options.ratio}
    return keys


def settings_of(options: argparse.Namespace, talks: Sequence[Interview]) -> dict[str, Any]:
    """Settings that all cells of a file share."""
    asked = json.dumps([prompts(talk, options.mode) for talk in talks]).encode()
    return {
        **{name: getattr(options, name) for name in SETTINGS},
        "asked": hashlib.sha256(asked).hexdigest()[:16],
        **machine.model_settings(options.model),
        "machine": machine.describe(),
    }


class Sweep:
    """Servers of one command, and the questions that they get."""

    def __init__(self, options: argparse.Namespace, talks: Sequence[Interview], results: Results) -> None:
        self.options, self.talks, self.results = options, talks, results
        self.wanted = keys_of(options)

    def missing(self) -> list[Key]:
        return [key for key in self.wanted if str(key) not in self.results.entries]

    def prepare(self) -> dict[Key, tuple[list[str], str | None]]:
        """Find flags and profile digest of every missing ragged server; missing profiles are calibrated.

        Raises:
            SettingsError, RaggedConfigError: budgets that cannot be served, or that differ from those of the file.
        """
        o = self.options
        missing = [key for key in self.missing() if key != TOKEN]
        if missing and budgets.is_recall_model(o.model):
            scorers = [scorer for scorer in o.scorer if any(key.scorer == scorer for key in missing)]
            budgets.calibrate(scorers, o.budgets, o.profiles, o.segment, o.calibrate_at)
        cells = self.results.as_kind(Cell)
        prepared: dict[Key, tuple[list[str], str | None]] = {}
        for key, name in self.wanted.items():
            if key.scorer is None:
                continue
            own = budgets.flags(key.scorer, name, o.profiles)
            known = cells.get(str(key))
            if known is None:
                found = budgets.digest(key, [*shlex.split(o.ragged_args), *own], o.model, o.segment)
                prepared[key] = (["--ragged-scorer", key.scorer, "--ragged-segment", str(o.segment), *own], found)
            elif known.profile is not None and budgets.is_there(key.scorer, name, o.profiles):
                found = budgets.digest(key, [*shlex.split(o.ragged_args), *own], o.model, o.segment)
                if found != known.profile:
                    raise SettingsError(
                        f"{self.results.path} holds the cell of {key} with the profile {known.profile}, and that is "
                        f"{found} now: choose another --output"
                    )
        return prepared

    def run(self, servers: Started, progress: Progress, prepared: dict[Key, tuple[list[str], str | None]]) -> None:
        """Ask every server that is missing.

        Raises:
            ServerLost: a server went away; names the file with the finished cells.
            SettingsError: a server does not start, or does not take the prompts.
        """
        missing, o = self.missing(), self.options
        bar = progress.add_task("servers", total=len(self.wanted), completed=len(self.wanted) - len(missing))
        log = self.results.path.with_suffix(".log")
        for key in missing:
            own_flags, digest = prepared.get(key, ([], None))
            own = progress.add_task(str(key), total=sum(len(talk.facts) for talk in self.talks))
            began = time.perf_counter()
            done = len(self.wanted) - len(self.missing())
            finished = f"{done} of {len(self.wanted)} servers are finished, their cells are in {self.results.path}"
            with (
                naming(str(key), log, finished),
                servers.client(Pool(key.ratio), o.max_running_requests, log, own_flags) as client,
            ):
                answered = self._ask(client, key, lambda own=own: progress.advance(own))
                share = client.ragged().get("kept_ratio")
            wall_s = round(time.perf_counter() - began, 1)
            cell = cell_of(key, answered, segment=o.segment, mean_share=share, profile=digest, wall_s=wall_s)
            self.results.add(str(key), cell)
            log.unlink(missing_ok=True)
            progress.remove_task(own)
            progress.advance(bar)

    def _ask(self, client: ServerClient, key: Key, on_answer: Any) -> list[Answered]:
        o = self.options
        longest, most = max(len(prompts(talk, o.mode)[-1]) for talk in self.talks), client.longest_prompt() - 1
        if longest > most:
            raise SettingsError(
                f"the server of {key} takes prompts of {most} tokens, and the longest has {longest}: more --kv-bytes"
            )
        at_once = conversations_at_once(self.talks, o.mode, client.pool_tokens(), o.max_running_requests, o.segment)
        try:
            return ask(client, self.talks, o.mode, at_once, on_answer)
        except PointFailed:
            client.check_alive()
            raise


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError and RaggedConfigError."""
    check(options)
    talks = interviews(options.conversations, options.questions, seed=options.seed)
    results = Results.open(options.output, "accuracy", settings_of(options, talks))
    sweep = Sweep(options, talks, results)
    console = Console(stderr=options.json)
    prepared = sweep.prepare()
    if sweep.missing():
        server_args, ragged_args = shlex.split(options.server_args), shlex.split(options.ragged_args)
        with (
            Started(options.model, options.kv_bytes, server_args, ragged_args) as servers,
            bars(console) as progress,
        ):
            sweep.run(servers, progress, prepared)
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

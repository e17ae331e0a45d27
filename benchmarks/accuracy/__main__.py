"""Accuracy through the server, on SGLang's pool and on the ragged one, by scorer, budgets and ratio.

    python -m benchmarks.accuracy [--scorer keydiff ..] [--ratio 0.5 0.3 0.2 0.1]
    python -m benchmarks.accuracy --suite scbench --data FOLDER --model FOLDER [--ratio 0.5 0.3]

Questions about long texts, in conversations or each on its own, with the text in the cache: the suite `recall` on the
recall model of this repository, or `ruler` and `scbench` from their files on any model. Every cell is a server of its
own; cells that the output file holds already are not run again. Writes JSON and a plot, prints tables.
benchmarks/accuracy/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shlex
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.accuracy import budgets, recall
from benchmarks.accuracy.asking import AnsweredQuestion, ask, sessions_at_once
from benchmarks.accuracy.cell import TOKEN, Key, cells_of
from benchmarks.accuracy.options import complete, form_of, keys_of, parser
from benchmarks.accuracy.plots import draw
from benchmarks.accuracy.prompts import TokenizedSession, load_tokenizer, make_talk, most_new_tokens
from benchmarks.accuracy.session import Session, SuiteError
from benchmarks.accuracy.store import Prompts, Results
from benchmarks.accuracy.tables import notes, tables
from benchmarks.harness import machine
from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import PointFailed, SettingsError
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.sweep import bars, naming

SETTINGS = (
    *("suite", "tasks", "limit", "conversations", "questions", "seed", "mode", "answers", "chat", "max_length"),
    *("segment", "kv_bytes", "max_running_requests", "server_args", "ragged_args"),
)
"""Options that cells of one file share. Which profiles a server had is in its cells."""

Prepared = dict[Key, tuple[list[str], str | None]]
"""Ragged servers that are missing: their flags, and the digest of their profile."""


def load_sessions(options: argparse.Namespace) -> list[Session]:
    """Raises SuiteError."""
    if options.suite == "recall":
        return recall.load(options.conversations, options.questions, options.seed)
    suite = importlib.import_module(f"benchmarks.accuracy.{options.suite}")
    sessions = suite.load(options.data, options.tasks, options.limit)
    if not sessions:
        raise SuiteError(f"--data {options.data} holds no sessions of {options.suite}")
    return sessions


def digest_of(sessions: Sequence[Session]) -> str:
    """Sixteen hexadecimal digits of all that is asked."""
    asked = [
        [s.name, s.context, s.may_be_cut, [[q.task, q.text, q.answer, q.new_tokens] for q in s.questions]]
        for s in sessions
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def settings_of(options: argparse.Namespace, sessions: Sequence[Session]) -> dict[str, Any]:
    """What all cells of a file share."""
    return {
        **{name: getattr(options, name) for name in SETTINGS},
        "data": options.data.resolve().name if options.data else None,
        "sessions": digest_of(sessions),
        **machine.model_settings(options.model),
        "machine": machine.describe(),
    }


class Sweep:
    """The servers of one command, and what they are asked."""

    def __init__(self, options: argparse.Namespace, sessions: Sequence[Session], results: Results) -> None:
        """Raises SuiteError for sessions that cannot be asked as wanted."""
        self.options, self.results = options, results
        tokenizer = load_tokenizer(options.model)
        if options.suite == "recall":
            recall.check_language(tokenizer)
        self.new_tokens = most_new_tokens(sessions)
        self.talks: list[TokenizedSession] = [make_talk(session, tokenizer, form_of(options)) for session in sessions]
        self.wanted = keys_of(options)
        limit = results.prompts.max_length if results.prompts else options.max_length
        if limit is not None:
            self._fit(limit)

    def missing(self) -> list[Key]:
        return [key for key in self.wanted if key not in self.results.known]

    def prepare(self) -> Prepared:
        """Flags of every missing ragged server, and its profile's digest; profiles that are missing are calibrated.

        Raises:
            SettingsError, RaggedConfigError: budgets that cannot be served, or not stand beside those of the file.
        """
        o = self.options
        missing = [key for key in self.missing() if key != TOKEN]
        if missing and budgets.is_recall_model(o.model):
            scorers = [scorer for scorer in o.scorer if any(key.scorer == scorer for key in missing)]
            budgets.calibrate(scorers, o.budgets, o.profiles, o.segment, o.calibrate_at)
        prepared: Prepared = {}
        for key, name in self.wanted.items():
            if key == TOKEN or key.scorer is None:
                continue
            flags = budgets.flags(key.scorer, name, o.profiles)
            if key in self.results.known:
                # A profile that is gone has nothing to be compared with, and nothing is run with it.
                if budgets.is_there(key.scorer, name, o.profiles):
                    self.results.check_profile(key, lambda key=key, flags=flags: self._digest(key, flags))
                continue
            digest = self._digest(key, flags)
            prepared[key] = (["--ragged-scorer", key.scorer, "--ragged-segment", str(o.segment), *flags], digest)
        return prepared

    def _digest(self, key: Key, flags: list[str]) -> str | None:
        given = [*shlex.split(self.options.ragged_args), *flags]
        return budgets.digest(key, given, self.options.model, self.options.segment)

    def run(self, servers: Started, progress: Progress, prepared: Prepared) -> None:
        """Ask every server that is missing.

        Raises:
            ServerLost: a server went away; says where the finished cells are.
            SettingsError, SuiteError: a server does not start, or does not take the prompts.
        """
        missing = self.missing()
        bar = progress.add_task("servers", total=len(self.wanted), completed=len(self.wanted) - len(missing))
        log = self.results.path.with_suffix(".log")
        for key in missing:
            flags, digest = prepared.get(key, ([], None))
            own = progress.add_task(str(key), total=sum(len(talk.session.questions) for talk in self.talks))
            began = time.perf_counter()
            done = len(self.wanted) - len(self.missing())
            finished = f"{done} of {len(self.wanted)} servers are finished, their cells are in {self.results.path}"
            with (
                naming(str(key), log, finished),
                servers.client(Pool(key.ratio), self.options.max_running_requests, log, flags) as client,
            ):
                asked = self._ask(client, key, lambda own=own: progress.advance(own))
                share = client.ragged().get("kept_ratio")
            cells = cells_of(
                key,
                asked,
                segment=self.options.segment,
                mean_share=share,
                profile=digest,
                wall_s=round(time.perf_counter() - began, 1),
            )
            self.results.add(cells, asked)
            log.unlink(missing_ok=True)
            progress.remove_task(own)
            progress.advance(bar)

    def _ask(self, client: ServerClient, key: Key, on_answer: Any) -> list[AnsweredQuestion]:
        most = client.longest_prompt() - self.new_tokens
        if self.results.prompts is None:
            self._fit(self.options.max_length or most)
        longest = max(talk.longest() for talk in self.talks)
        if longest > most:
            raise SettingsError(
                f"the server of {key} takes prompts of {most} tokens beside an answer, but the longest prompt has "
                f"{longest}: more --kv-bytes, or a smaller --max-length and another --output"
            )
        o = self.options
        at_once = sessions_at_once(self.talks, self.new_tokens, client.pool_tokens(), o.max_running_requests, o.segment)
        try:
            return ask(client, self.talks, at_once, on_answer)
        except PointFailed:
            client.check_alive()
            raise

    def _fit(self, limit: int) -> None:
        """Cut what is longer. The limit of the first server holds for all: they must be asked the same."""
        self.talks = [talk.fitted(limit) for talk in self.talks]
        self.results.prompts = Prompts(
            sessions=len(self.talks),
            questions=sum(len(talk.session.questions) for talk in self.talks),
            cut=sum(talk.was_cut for talk in self.talks),
            max_length=limit,
        )


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, draw and print. Raises BenchmarkError and RaggedConfigError."""
    complete(options)
    sessions = load_sessions(options)
    results = Results.open(options.output, settings_of(options, sessions), provenance("benchmarks.accuracy"))
    sweep = Sweep(options, sessions, results)
    console = Console(stderr=options.json)
    prepared = sweep.prepare()
    if sweep.missing():
        server_args, ragged_args = shlex.split(options.server_args), shlex.split(options.ragged_args)
        with (
            Started(options.model, options.kv_bytes, server_args, ragged_args) as servers,
            bars(console) as progress,
        ):
            sweep.run(servers, progress, prepared)
    draw(results.cells, options.output.with_suffix(".png"))
    results.show(tables(results.settings, results.cells), console, as_json=options.json)
    if results.prompts is not None:
        p = results.prompts
        cut = f"{p.cut} of them lost the middle of their context" if p.cut else "none was cut"
        text = f"{p.sessions} sessions, {p.questions} questions, prompts of {p.max_length} tokens at most: {cut}"
        console.print(text, highlight=False, soft_wrap=True)
    for line in notes(results.cells):
        console.print(line, style="red", highlight=False, soft_wrap=True)
    console.print(f"cells, answers and plot: {options.output.with_suffix('')}.*", highlight=False, soft_wrap=True)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    with command("accuracy"):
        run(options)


if __name__ == "__main__":
    main()

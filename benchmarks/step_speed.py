"""What a prefill and a decode step cost by pool: the ragged pool at ratio 1 and below against SGLang's token pool.

    python -m benchmarks step_speed [--model M] [--pools token,ragged@1,ragged@0.3] [--batch 8] [--context 2000]

All servers are up at once and take turns (A B A B), one request or batch at a time, so that only ratios within a round
mean anything. At ratio 1 nothing is compressed: the difference to the token pool is what the pool itself costs. Timed:

- prefill: a prompt of --context tokens that nothing is cached of, until its first token;
- extend: --extend new tokens after --context cached ones, until the first token;
- decode: one step of --batch requests with --context cached tokens each: a run of 1 + --steps tokens less a run of 1.

A pool written as ragged@0.3+draft=4, or token+draft=4, verifies chains of four tokens, drafted by n-grams; --draft 4
says so of all pools. A "step" of decode is a token of each request then, however many of them the server computes at
once, and a second table has steps that verify and what they accept. The same answers come in every round, so most
drafts are right.

--clock cpu counts CPU seconds of the servers' processes: where other programs take the cores, and with
OMP_NUM_THREADS=1, so that no thread counts as busy that waits for another.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from rich.console import Console

from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.machine import describe
from benchmarks.harness.options import new_parser
from benchmarks.harness.pools import DRAFT, Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars
from benchmarks.harness.table import Table
from benchmarks.recall import MODEL

TOKENS = (10, 300)
"""Prompts are drawn from these token ids, which every model has."""

VERIFY = "verify"
"""The row of a step that verifies drafts."""

SIZES = ("batch", "context", "extend", "steps", "rounds")


@dataclass(frozen=True)
class Taken:
    """Until all prompts, sent at once, were answered. cached: the fewest tokens of any. steps: the most that verified
    drafts of one."""

    seconds: float
    cached: int
    steps: int = 0


def take(client: ServerClient, prompts: list[list[int]], new: int) -> Taken:
    """Have prompts answered, with `new` tokens each."""

    def send(prompt: list[int]) -> dict[str, Any]:
        return client.generate(prompt, new, ignore_eos=True)["meta_info"]

    started = client.clock()
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(send, prompts))
    taken = client.clock() - started
    return Taken(taken, min(one["cached_tokens"] for one in found), max(one.get("spec_verify_ct", 0) for one in found))


def cpu_clock(url: str) -> Callable[[], float]:
    """CPU seconds so far of the server that listens at a local address, and of the processes that it started."""
    port = urlsplit(url).port
    (pid,) = {one.pid for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port}
    assert pid is not None, "the server is ours"
    parent = psutil.Process(pid)

    def clock() -> float:
        times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))

    return clock


@dataclass(frozen=True)
class Phases:
    """What is timed. Each method returns the milliseconds of one round, by row of the table; all servers get the same
    prompts in a round."""

    batch: int
    context: int
    extend_by: int
    steps: int
    seed: int

    def prefill(self, client: ServerClient, number: int) -> dict[str, float]:
        taken = take(client, [self._tokens(self.context, 1, number)], 1)
        if taken.cached:
            raise Spoilt(f"{taken.cached} tokens of a prompt that was never sent before were cached")
        return {"prefill": 1000 * taken.seconds}

    def extend(self, client: ServerClient, number: int) -> dict[str, float]:
        context = self._contexts()[0]
        take(client, [context], 1)
        taken = take(client, [context + self._tokens(self.extend_by, 2, number)], 1)
        self._check(taken.cached)
        return {"extend": 1000 * taken.seconds}

    def decode(self, client: ServerClient, number: int) -> dict[str, float]:
        """Per token of each request; with drafts per step that verifies, too."""
        take(client, self._contexts(), 1)
        short = take(client, self._contexts(), 1)
        self._check(short.cached)
        long = take(client, self._contexts(), 1 + self.steps)
        taken = 1000 * (long.seconds - short.seconds)
        return {"decode": taken / self.steps} | ({VERIFY: taken / long.steps} if long.steps else {})

    def _contexts(self) -> list[list[int]]:
        return [self._tokens(self.context, 0, number) for number in range(self.batch)]

    def _tokens(self, count: int, *stream: int) -> list[int]:
        return np.random.default_rng([self.seed, *stream]).integers(*TOKENS, count).tolist()

    def _check(self, cached: int) -> None:
        if cached < self.context // 2:
            raise Spoilt(
                f"only {cached} of {self.context} tokens were cached: give more --kv-bytes or a longer --context"
            )


class Spoilt(BenchmarkError):
    """A request did not find the cache in the state that its phase needs."""


def summary(times: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Median milliseconds of each phase and pool, and the median over rounds of the ratio to the first pool."""
    rows = []
    for phase, pools in times.items():
        # Some rows are of pools with drafts alone.
        pools = {pool: values for pool, values in pools.items() if values}
        base = next(iter(pools.values()), [])
        for pool, values in pools.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            row = {"phase": phase, "pool": pool, "median_ms": statistics.median(values)}
            rows.append(row | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)})
    return rows


def table(results: Results, title: str) -> Table:
    """One row for each phase and pool."""
    base = results.settings["pools"][0]
    columns = ("phase", "pool", "median ms", f"/ {base}", "least round", "greatest round")
    names = ("ratio", "low", "high")
    rows = tuple(
        (
            row["phase"],
            row["pool"],
            f"{row['median_ms']:.1f}",
            *(f"{row[name]:.2f}" for name in names),
        )
        for row in results.entries["summary"]
    )
    return Table(title, columns, rows)


def drafts_table(results: Results) -> Table:
    """Return a table of verified and accepted drafts, medians over rounds; without rows if no pool has drafts."""
    times, batch = results.entries["ms"], results.settings["batch"]
    verified = {pool: values for pool, values in times.get(VERIFY, {}).items() if values}
    rows = []
    for pool, steps in verified.items():
        per_step = [step / token for step, token in zip(steps, times["decode"][pool], strict=True)]
        found = [1000 / one for one in steps], [1000 * batch / one for one in times["decode"][pool]]
        rows.append((pool, *(f"{statistics.median(one):.1f}" for one in (*found, per_step))))
    columns = ("pool", "steps/s", "accepted tokens/s", "accepted a step and request")
    return Table("drafts", columns, rows)


def measure(options: argparse.Namespace, pools: list[Pool], console: Console) -> dict[str, dict[str, list[float]]]:
    """Start one server for each pool, time them in turns, stop them. Returns milliseconds by phase and pool."""
    phases = Phases(options.batch, options.context, options.extend, options.steps, options.seed)
    timed = {"prefill": phases.prefill, "extend": phases.extend, "decode": phases.decode}
    shown = [*timed, *([VERIFY] if any(pool.drafts for pool in pools) else [])]
    times: dict[str, dict[str, list[float]]] = {row: {pool.name: [] for pool in pools} for row in shown}
    flags = ["--skip-tokenizer-init", "--sleep-on-idle"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Started(str(options.model), options.kv_bytes, flags, []) as servers,
        contextlib.ExitStack() as stack,
        bars(console) as progress,
    ):
        bar = progress.add_task("starting servers", total=(1 + options.rounds) * len(timed))
        running = {}
        for number, pool in enumerate(pools):
            log = Path(folder) / f"{number}.log"
            client = running[pool.name] = stack.enter_context(servers.client(pool, options.batch, log))
            if options.clock == "cpu":
                client.clock = cpu_clock(client.url)
        # Round 0 warms up: contexts get into the caches, and whatever compiles does so.
        for number in range(1 + options.rounds):
            for phase, time_it in timed.items():
                progress.update(bar, description=f"round {number} of {options.rounds}, {phase}")
                for name, client in running.items():
                    taken = time_it(client, number)
                    for row, milliseconds in taken.items() if number else ():
                        times[row][name].append(milliseconds)
                progress.advance(bar)
    return times


def main() -> None:
    parser = new_parser("step_speed", __doc__)
    parser.add_argument("--model", default=str(MODEL), help="[the recall model]")
    parser.add_argument(
        "--pools", default="token,ragged@1,ragged@0.3", help="the first is what others are held against"
    )
    parser.add_argument("--draft", type=int, metavar="N", help="all pools verify drafts, in chains of N tokens [none]")
    parser.add_argument("--batch", type=int, default=8, help="[8]")
    parser.add_argument("--context", type=int, default=2000, help="tokens [2000]")
    parser.add_argument("--extend", type=int, default=64, help="tokens [64]")
    parser.add_argument("--steps", type=int, default=40, help="decode steps [40]")
    parser.add_argument("--rounds", type=int, default=6, help="[6]")
    parser.add_argument("--kv-bytes", default="1GiB", help="of every server [1GiB]")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what is counted [wall]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if min(getattr(options, name) for name in SIZES) < 1:
        parser.error(", ".join(f"--{name}" for name in SIZES) + " must be at least 1")
    with command("step_speed"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measure and print. Raises BenchmarkError."""
    console = Console(stderr=options.json)
    texts = [f"{text}+{DRAFT}={options.draft}" if options.draft else text for text in options.pools.split(",")]
    pools = [Pool.parse(text) for text in texts]
    settings = {name: getattr(options, name) for name in (*SIZES, "kv_bytes", "seed", "clock")}
    settings |= {"model": Path(options.model).name, "pools": [pool.name for pool in pools], "machine": describe()}
    times = measure(options, pools, console)
    about, entries = provenance("step_speed"), {"ms": times, "summary": summary(times)}
    results = Results(options.output or Path("step-speed.json"), "step_speed", settings, about, entries)
    if options.output:
        results.write()
    made = [table(results, f"batch {options.batch}, {options.context} tokens of context"), drafts_table(results)]
    results.show([one for one in made if one.rows], console, as_json=options.json)


if __name__ == "__main__":
    main()

"""What a prefill and a decode step cost by pool: the ragged pool at ratio 1 and below against SGLang's token pool.

    python -m benchmarks.step_speed [--model M] [--pools token,ragged@1,ragged@0.3] [--batch 8] [--context 2000]

All servers are up at once and take turns (A B A B), one request or batch at a time, so that only ratios within a round
mean anything. At ratio 1 nothing is compressed: the difference to the token pool is what the pool itself costs. Timed:

- prefill: a prompt of --context tokens that nothing is cached of, until its first token;
- extend: --extend new tokens after --context cached ones, until the first token;
- decode: one step of --batch requests with --context cached tokens each: a run of 1 + --steps tokens less a run of 1.

A pool written as ragged@0.3+draft=4 verifies chains of four tokens, drafted by n-grams: a "step" of decode is a token
of each request then, however many of them the server computes at once. The same answers come in every round, so most
drafts are right. SGLang's own pool runs no drafts on CPUs without AMX.

--clock cpu counts CPU seconds of the servers' processes: where other programs take the cores, and with
OMP_NUM_THREADS=1, so that no thread counts as busy that waits for another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from benchmarks.demo import MODEL
from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.files import write_whole
from benchmarks.harness.machine import describe
from benchmarks.harness.options import new_parser
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.rows import Rows
from benchmarks.harness.sweep import bars

TOKENS = (10, 300)
"""Prompts are drawn from these token ids, which every model has."""

SIZES = ("batch", "context", "extend", "steps", "rounds")


def seconds(client: ServerClient, prompts: list[list[int]], new: int) -> tuple[float, int]:
    """Seconds until all prompts, sent at once, have `new` tokens each; the fewest cached tokens of any."""

    def send(prompt: list[int]) -> int:
        return client.generate(prompt, new, ignore_eos=True)["meta_info"]["cached_tokens"]

    started = client.clock()
    with ThreadPoolExecutor(len(prompts)) as threads:
        cached = list(threads.map(send, prompts))
    return client.clock() - started, min(cached)


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
    """What is timed. Each method returns the milliseconds of one round; all servers get the same prompts in a round."""

    batch: int
    context: int
    extend_by: int
    steps: int
    seed: int

    def prefill(self, client: ServerClient, number: int) -> float:
        taken, cached = seconds(client, [self._tokens(self.context, 1, number)], 1)
        if cached:
            raise Spoilt(f"{cached} tokens of a prompt that was never sent before were cached")
        return 1000 * taken

    def extend(self, client: ServerClient, number: int) -> float:
        context = self._contexts()[0]
        seconds(client, [context], 1)
        taken, cached = seconds(client, [context + self._tokens(self.extend_by, 2, number)], 1)
        self._check(cached)
        return 1000 * taken

    def decode(self, client: ServerClient, number: int) -> float:
        seconds(client, self._contexts(), 1)
        short, cached = seconds(client, self._contexts(), 1)
        self._check(cached)
        return 1000 * (seconds(client, self._contexts(), 1 + self.steps)[0] - short) / self.steps

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
        base = next(iter(pools.values()))
        for pool, values in pools.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            row = {"phase": phase, "pool": pool, "median_ms": statistics.median(values)}
            rows.append(row | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)})
    return rows


def table(result: dict[str, Any], title: str) -> Rows:
    """One row for each phase and pool."""
    base = result["options"]["pools"][0]
    columns = ("phase", "pool", "median ms", f"/ {base}", "least round", "greatest round")
    names = ("ratio", "low", "high")
    rows = tuple(
        (
            row["phase"],
            row["pool"],
            f"{row['median_ms']:.1f}",
            *(f"{row[name]:.2f}" for name in names),
        )
        for row in result["summary"]
    )
    return Rows(title, columns, rows)


def measure(options: argparse.Namespace, pools: list[Pool], console: Console) -> dict[str, Any]:
    """Start one server for each pool, time them in turns, stop them. Returns the JSON document."""
    phases = Phases(options.batch, options.context, options.extend, options.steps, options.seed)
    timed = {"prefill": phases.prefill, "extend": phases.extend, "decode": phases.decode}
    times: dict[str, dict[str, list[float]]] = {phase: {pool.name: [] for pool in pools} for phase in timed}
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
                    if number:
                        times[phase][name].append(taken)
                progress.advance(bar)
    named = {name: getattr(options, name) for name in (*SIZES, "kv_bytes", "seed", "clock")}
    named |= {"model": Path(options.model).name, "pools": [pool.name for pool in pools]}
    return {"options": named, "machine": describe(), "ms": times, "summary": summary(times)}


def main() -> None:
    parser = new_parser("step_speed", __doc__)
    parser.add_argument("--model", default=str(MODEL), help="[the recall model]")
    parser.add_argument(
        "--pools", default="token,ragged@1,ragged@0.3", help="the first is what others are held against"
    )
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
    result = measure(options, [Pool.parse(text) for text in options.pools.split(",")], console)
    if options.output:
        write_whole(options.output, json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        table(result, f"batch {options.batch}, {options.context} tokens of context").show(console)


if __name__ == "__main__":
    main()

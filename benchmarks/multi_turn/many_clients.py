"""Traffic of many clients: every point is a pool, a number of clients and a repetition.

Each is on a server of its own with nothing cached; the pools take turns. Options of SGLang's own multi-turn benchmark
have its defaults.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed, SettingsError
from benchmarks.harness.options import check_counts, recorded
from benchmarks.harness.pools import Connected, Pool, Servers, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.multi_turn import driver, tables
from benchmarks.multi_turn.point import Key, Point, points
from benchmarks.multi_turn.schedule import Schedule
from benchmarks.multi_turn.shapes import longest, working_set
from benchmarks.multi_turn.verdict import Targets, have_same_bytes, reason_to_reject
from benchmarks.multi_turn.writers import writer_for
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import parse_bytes

LONG_ANSWER = 256
"""Tokens of an answer from which times are shown along it."""

DEFAULTS = {"pools": "token,ragged@0.5,ragged@0.3", "kv_bytes": "96MiB", "seed": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--clients", "--num-clients", type=int, nargs="+", default=[256], help="one or more [256]")
    traffic.add_argument("--rounds", "--num-rounds", type=int, default=5, help="requests of each client [5]")
    traffic.add_argument("--request-length", type=int, default=512, help="of each new message (chat: mean) [512]")
    traffic.add_argument("--output-length", type=int, default=64, help="of each answer, exactly [64]")
    traffic.add_argument("--max-parallel", type=int, default=128, help="requests in flight at most [128]")
    traffic.add_argument("--request-rate", type=float, default=1.0, help="mean per second, or inf [1.0]")
    traffic.add_argument("--shared-length", type=int, default=2048, help="documents, agents: shared text [2048]")
    traffic.add_argument(
        "--group", type=int, default=4, help="clients of one document, or of one forked conversation [4]"
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--server-args", default="", metavar="TEXT", help="further flags of all servers")
    servers.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged ones")
    servers.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="POOL=URL[,URL...]",
        help="a server that runs already, or a router and its servers; once for each pool, instead of --pools",
    )
    runs = parser.add_argument_group("points")
    runs.add_argument("--repeats", type=int, default=2, help="runs of each point, pools taking turns [2]")
    runs.add_argument(
        "--min-load", type=float, default=0.8, help="reject points below this share of the asked load [0.8]"
    )
    runs.add_argument(
        "--min-hit-rate", type=float, default=0.0, help="reject points below, cached / reusable tokens [0: none]"
    )
    runs.add_argument("--poll-every", type=float, default=1.0, metavar="S", help="seconds between polls [1]")


def check(options: argparse.Namespace) -> None:
    """Raises SettingsError for numbers out of range."""
    counts = ("rounds", "request_length", "output_length", "max_parallel", "shared_length", "group", "repeats")
    check_counts(options, *counts)
    try:
        parse_bytes(options.kv_bytes)
    except RaggedConfigError as error:
        raise SettingsError(f"--kv-bytes: {error}") from None
    if min(options.clients) < 1 or len(set(options.clients)) < len(options.clients):
        raise SettingsError("--clients must be different numbers of at least 1")
    if not options.request_rate > 0 or not options.poll_every > 0:
        raise SettingsError("--request-rate and --poll-every must be greater than 0")
    if options.seed < 0 or not 0 <= options.min_load <= 1 or not 0 <= options.min_hit_rate <= 1:
        raise SettingsError("--seed must not be negative; --min-load and --min-hit-rate are shares from 0 to 1")


def pools_of(options: argparse.Namespace) -> tuple[list[Pool], dict[Pool, list[str]]]:
    """The pools in their order, and the addresses of servers that run already, as `Connected` takes them."""
    urls = {}
    for text in options.url:
        name, found, addresses = text.partition("=")
        if not found or not all(url.startswith("http") for url in addresses.split(",")):
            raise SettingsError(
                f"--url {text!r}: write POOL=http://HOST:PORT, and the servers of a router behind it, with commas"
            )
        urls[Pool.parse(name)] = addresses.split(",")
    pools = list(urls) or [Pool.parse(name) for name in options.pools.split(",")]
    if len(set(pools)) < len(pools):
        raise SettingsError("each pool can be measured once only")
    return pools, urls


def settings_of(options: argparse.Namespace, pools: list[Pool]) -> dict[str, Any]:
    """Settings that all points of a file share."""
    # Infinity has no JSON form.
    named = {"pools": [pool.name for pool in pools], "request_rate": str(options.request_rate)}
    return recorded(options) | named | {"url": bool(options.url)}


class Benchmark:
    """The points of one command, and what they are measured with."""

    def __init__(self, options: argparse.Namespace, schedule: Schedule, results: Results) -> None:
        self.options, self.schedule, self.results = options, schedule, results

    def remaining(self) -> list[tuple[Pool, Key]]:
        return [(pool, key) for pool, key in self.schedule.keys if str(key) not in self.results.entries]

    def run_all(self, servers: Servers, progress: Progress) -> None:
        """Measure what is missing. Raises ServerLost, with where the finished points are, when a server goes away."""
        remaining = self.remaining()
        task = progress.add_task(
            "points", total=len(self.schedule.keys), completed=len(self.schedule.keys) - len(remaining)
        )
        for pool, key in remaining:
            own = progress.add_task(f"{key}: server", total=len(self.schedule.requests[key.clients]))
            log = self.results.path.with_suffix(f".{key.pool}-{key.clients}-{key.repeat + 1}.log")
            running = min(self.options.max_parallel, key.clients)
            done = f"{len(self.results.entries)} of {len(self.schedule.keys)} points"
            with (
                naming(str(key), log, f"{done} are finished and kept in {self.results.path}"),
                servers.client(pool, running, log) as client,
            ):
                point = self._measure(client, key, progress, own)
                self.check_bytes(point)
                self.results.add(str(key), point)
            log.unlink(missing_ok=True)
            progress.remove_task(own)
            progress.advance(task)

    def _measure(self, client: ServerClient, key: Key, progress: Progress, task: TaskID) -> Point:
        """One point. A request that is not served rejects it; a server that went away raises ServerLost."""
        o, requests = self.options, self.schedule.requests[key.clients]
        needed, limit = longest(requests, o.output_length), client.longest_prompt()
        if needed > limit:
            raise SettingsError(
                f"the longest conversation may take {needed} tokens, but {key.pool} takes prompts of {limit} at most: "
                "more --kv-bytes, fewer --rounds or shorter messages"
            )
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        traffic = driver.Traffic(o.output_length, o.max_parallel, o.request_rate, o.seed)
        warm_up = driver.Traffic(min(4, o.output_length), o.max_parallel, math.inf, o.seed)
        try:
            progress.update(task, description=f"{key}: warm-up")
            warming = self.schedule.warm_up[key.clients]
            driver.run(client.url, o.model, warming, warm_up, poll_every_s=o.poll_every, polled=client.pools)
            client.flush()
            progress.update(task, description=str(key))
            run = driver.run(
                client.url,
                o.model,
                requests,
                traffic,
                poll_every_s=o.poll_every,
                polled=client.pools,
                on_answer=lambda: progress.advance(task),
            )
        except PointFailed as error:
            client.check_alive()
            return Point(key, str(error), date, 0, 0, client.start_up_line(), 0.0, 0.0, (), ())
        targets = Targets(
            requests=len(requests),
            # A shape may have fewer requests than clients and rounds: branches share what is before the fork.
            parallel=min(o.max_parallel, len(requests) / o.rounds),
            request_rate=o.request_rate,
            min_load=o.min_load,
            min_hit_rate=o.min_hit_rate,
        )
        return Point(
            key=key,
            rejected=reason_to_reject(run, targets),
            date=date,
            virtual_tokens=run.pool.tokens,
            kv_bytes=run.pool.kv_bytes,
            start_up=client.start_up_line(),
            rate_share=round(run.rate_share, 4),
            duration_s=round(run.duration_s, 4),
            answers=run.answers,
            samples=run.samples,
        )

    def check_bytes(self, point: Point) -> None:
        """Raises SettingsError when the pools do not have the same bytes."""
        for other in points(self.results):
            if not have_same_bytes((point.kv_bytes, other.kv_bytes)):
                raise SettingsError(
                    f"{point.key.pool} has {point.kv_bytes} bytes of KV and {other.key.pool} {other.kv_bytes}: pools "
                    "are compared at the same bytes; give servers the same --kv-bytes"
                )


def run(options: argparse.Namespace) -> None:
    """Measure what the file lacks, and print. Raises BenchmarkError."""
    check(options)
    pools, urls = pools_of(options)
    console = Console(stderr=options.json)
    schedule = Schedule.of(options, pools, writer_for(options.model))
    path = options.output or Path(f"multi-turn-{options.shape}.json")
    results = Results.open(path, "multi_turn", settings_of(options, pools))
    benchmark = Benchmark(options, schedule, results)
    for count, requests in schedule.requests.items():
        console.print(
            f"{options.shape}, {count} clients: {len(requests)} requests, longest {longest(requests, 0)} tokens, "
            f"working set {working_set(requests, options.output_length)} tokens",
            highlight=False,
        )
    if benchmark.remaining():
        started = Started(
            options.model, options.kv_bytes, shlex.split(options.server_args), shlex.split(options.ragged_args)
        )
        with Connected(urls) if urls else started as servers, bars(console) as progress:
            benchmark.run_all(servers, progress)
    measured = points(results)
    made = [tables.totals(measured), *(tables.by_round(measured, count) for count in options.clients)]
    made += [tables.by_part(measured)] if options.output_length >= LONG_ANSWER else []
    results.show([table for table in made if table.rows], console, as_json=options.json)
    for line in tables.rejections(measured):
        console.print(f"rejected: {line}", style="red", highlight=False)
    console.print(f"points: {path}", highlight=False)

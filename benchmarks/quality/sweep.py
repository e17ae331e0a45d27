"""One server after the other, all with the same tasks, and the end of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.harness.client import ServerClient
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.harness.table import Table
from benchmarks.quality.served import Answers, Read, ask
from benchmarks.quality.tasks import Tasks
from benchmarks.quality.texts import Text

CALIBRATION_S = 3600.0
"""A server that calibrates its model first takes minutes to start."""

Key = TypeVar("Key")


def answers(
    options: argparse.Namespace,
    tasks: Tasks,
    tokenizer: Any,
    read: Callable[[ServerClient, Text], Read],
    served: Mapping[Key, tuple[Pool, Sequence[str]]],
    *,
    requests: int,
    common: Sequence[str] = (),
    ragged: Sequence[str] = (),
) -> Iterator[tuple[Key, Answers[Read]]]:
    """Start and ask one server after the other; `ask` says what of. No process is started where `served` is empty.

    Args:
        served: pools and flags of one server alone, by what names it.
        requests: that may run at once.
        common, ragged: further flags of all servers, and of the ragged ones.

    Raises:
        ServerLost, SettingsError: one that was lost, or that refused something; says where its log is.
    """
    if not served:
        return
    log = options.output.with_suffix(".log")
    with (
        Started(options.model, options.kv_bytes, common, ragged) as servers,
        bars(Console(stderr=options.json)) as progress,
    ):
        bar = progress.add_task("servers", total=len(served))
        for key, (pool, flags) in served.items():
            own = progress.add_task(str(key), total=tasks.count)
            with (
                naming(str(key), log),
                servers.client(pool, requests, log, flags, ready_within_s=CALIBRATION_S) as client,
            ):
                found = ask(client, tasks, tokenizer, read, lambda own=own: progress.advance(own))
            yield key, found
            log.unlink(missing_ok=True)
            progress.remove_task(own)
            progress.advance(bar)


def finish(options: argparse.Namespace, results: Results, tables: Sequence[Table]) -> None:
    """Print the results and the name of their file."""
    console = Console(stderr=options.json)
    results.show(tables, console, as_json=options.json)
    console.print(f"results: {options.output}", highlight=False, soft_wrap=True)

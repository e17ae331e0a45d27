"""Many clients, too small a pool, requests that are left, aborted and retracted: is every answer a quiet server's?

    python -m benchmarks storm                                  # one server with several features, about a minute
    python -m benchmarks storm --features gate tier lpm         # one server with these
    python -m benchmarks storm --pairs                          # every pair of features that a server accepts

Each storm is a server on a CPU with SGLang's own memory checks on, and a second, quiet one with the same flags: what
the first answered in the storm is compared with what the second says to the same request, alone and with an empty
cache. benchmarks/storm/README.md says more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness.command import command
from benchmarks.harness.errors import BenchmarkError, ServerFailed, SettingsError
from benchmarks.harness.machine import describe
from benchmarks.harness.options import check_counts, new_parser
from benchmarks.harness.results import Results
from benchmarks.harness.server_pool import ServerPool
from benchmarks.harness.sweep import bars
from benchmarks.storm.features import FEATURES, HIDING, chosen, server_settings
from benchmarks.storm.material import Material
from benchmarks.storm.one_storm import Limits, Outcome, run_storm
from benchmarks.storm.pairs import Pair, cover, narrow, shown
from benchmarks.storm.refusals import OWN, refusals, refuses_in_one_line
from benchmarks.storm.tables import REFUSED, key, refused, storms, survived, tables

DEFAULT = ("gate", "tier", "mixed-chunk", "lpm")
MOST_FEATURES = 10
"""Of a server of --pairs, before what comes by itself: with more, one may hide what another does."""


def parser() -> argparse.ArgumentParser:
    made = new_parser("storm", __doc__)
    made.add_argument("--features", nargs="+", default=list(DEFAULT), metavar="NAME", help=f"[{' '.join(DEFAULT)}]")
    made.add_argument("--pairs", action="store_true", help="storms that hold every pair of features between them")
    made.add_argument(
        "--no-narrow", action="store_true", help="do not look for the fewest features of a storm that fails"
    )
    made.add_argument("--requests", type=int, default=200, help="of a storm, at most [200]")
    made.add_argument("--seconds", type=float, default=60, help="after which a storm sends none any more [60]")
    made.add_argument("--compared", type=int, default=200, help="answers that are asked for again, at most [200]")
    made.add_argument("--seed", type=int, default=0, help="[0]")
    made.add_argument("--list", action="store_true", help="name the features and end")
    made.add_argument("--output", type=Path, default=Path("storm.json"))
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


def names_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Of the features of a server that asks for these; () where two are settings of one flag."""
    try:
        return tuple(one.name for one in chosen(asked))
    except SettingsError:
        return ()


def ask_refusals(servers: ServerPool, material: Material) -> dict[Pair, str]:
    """Every feature, as a pair of itself twice, and every two of them that a server refuses, with its own line.

    Raises:
        BenchmarkError: a server refuses with a traceback, or with more than its line.
    """
    alone = [(name, name) for name in FEATURES]
    pairs = [pair for pair in itertools.combinations(sorted(FEATURES), 2) if names_of(pair)]
    asked = [*alone, *pairs]
    settings = [server_settings(chosen(pair), material, Path("pages"), quiet=False) for pair in asked]
    said = dict(zip(asked, refusals(servers, settings), strict=True))
    found = {pair: reason for pair, reason in said.items() if reason is not None}
    # A feature that is refused by itself is so with all others.
    found = {
        pair: reason for pair, reason in found.items() if pair[0] == pair[1] or not {(n, n) for n in pair} & set(found)
    }
    first = {}
    for pair, reason in found.items():
        first.setdefault(reason, pair)
    for reason, pair in first.items():
        if reason.startswith(OWN):
            one = server_settings(chosen(pair), material, Path("pages"), quiet=False)
            if wrong := refuses_in_one_line(servers, one):
                raise BenchmarkError(f"{' with '.join(pair)} is not refused in one line: {wrong}")
    return found


def run(options: argparse.Namespace) -> None:
    """Run the storms that the output file lacks, and print. Raises BenchmarkError, where one was not survived, too."""
    check_counts(options, "requests", "seconds", "compared")
    chosen(options.features)
    limits = Limits(options.requests, options.seconds, options.compared, options.seed)
    results = Results.open(options.output, "storm", {"machine": describe(), **vars(limits)})
    console = Console(stderr=options.json)
    with (
        tempfile.TemporaryDirectory(prefix="storm-") as folder,
        ServerPool() as servers,
        bars(console) as progress,
    ):
        material = Material(Path(folder))

        def one(names: Sequence[str]) -> Outcome:
            task = progress.add_task(key(tuple(names)), total=limits.requests + limits.compared)
            log = options.output.with_suffix(f".{'-'.join(names)}.log")
            try:
                outcome = run_storm(
                    servers, chosen(names), material, limits, log, advance=lambda: progress.advance(task)
                )
            except ServerFailed as error:
                outcome = Outcome(tuple(names), problems=[f"a server did not start: {error.reason}"])
            progress.remove_task(task)
            if not outcome.problems:
                for written in (log, log.with_stem(f"{log.stem}-quiet")):
                    written.unlink(missing_ok=True)
            console.print(f"{key(outcome.features)}: {'; '.join(outcome.problems) or 'survived'}", markup=False)
            return outcome

        if options.pairs:
            if REFUSED not in results.entries:
                found = ask_refusals(servers, material)
                results.add(REFUSED, [(*pair, reason) for pair, reason in found.items()])
            no = refused(results)
            served = [name for name in FEATURES if (name, name) not in no]
            # What failed before is tried again; only what neither it nor others have shown needs further storms.
            again = [one.features for one in storms(results).values() if one.problems]
            done = survived(results).union(*(shown(names, HIDING) for names in again))
            rows = again + cover(served, no, names_of, HIDING, MOST_FEATURES, done)
        else:
            rows = [names_of(options.features)]
        console.print(f"{len(rows)} storms", highlight=False)
        for names in rows:
            before = storms(results).get(key(names))
            if before is not None and not before.problems:
                continue
            outcome = one(names)
            results.add(key(outcome.features), outcome)
            if outcome.problems and len(names) > 2 and not options.no_narrow:
                fewest = narrow(names, lambda fewer: bool(names_of(fewer)) and bool(one(names_of(fewer)).problems))
                outcome.problems.append(f"fails with {key(fewest)} alone")
                results.add(key(outcome.features), outcome)
    results.show(tables(results), console, as_json=options.json)
    console.print(f"results: {options.output}", highlight=False, soft_wrap=True)
    if failed := [one for one in storms(results).values() if one.problems]:
        worst = failed[0]
        raise BenchmarkError(
            f"{len(failed)} of {len(storms(results))} storms were not survived; {key(worst.features)}: "
            f"{'; '.join(worst.problems)}; the logs are {options.output.with_suffix('.*.log')}"
        )


def main() -> None:
    options = parser().parse_args()
    if options.list:
        for one in FEATURES.values():
            print(f"{one.name:20} {one.text}")
        return
    # Servers of a storm share the cores with its clients and with the quiet server.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with command("storm"):
        run(options)


if __name__ == "__main__":
    main()

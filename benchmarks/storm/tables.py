"""Entries of a storm's results, and their tables."""

from __future__ import annotations

from benchmarks.harness.results import Results
from benchmarks.harness.table import Table
from benchmarks.storm.features import HIDING
from benchmarks.storm.one_storm import Outcome
from benchmarks.storm.pairs import Pair, shown

REFUSED = "refused"
"""The entry with pairs of features that a server refuses, or one feature twice, each with the server's own line."""


def key(features: tuple[str, ...]) -> str:
    """Name a storm."""
    return " + ".join(features)


def storms(results: Results) -> dict[str, Outcome]:
    """Outcomes by the name of the storm."""
    return {
        name: Outcome(**one | {field: tuple(one[field]) for field in ("features", "inexact")})
        for name, one in results.entries.items()
        if name != REFUSED
    }


def refused(results: Results) -> dict[Pair, str]:
    """The server's line for each refused pair; empty where pairs were not tried."""
    return {(first, second): reason for first, second, reason in results.entries.get(REFUSED, ())}


def survived(results: Results) -> set[Pair]:
    """Pairs that were in a storm without problems."""
    good = [one for one in storms(results).values() if not one.problems]
    return {pair for one in good for pair in shown(one.features, HIDING)}


def tables(results: Results) -> list[Table]:
    """Storms, and refused pairs if there are any."""
    made = [_storms(results), _refusals(results)]
    return [table for table in made if table.rows]


def _storms(results: Results) -> Table:
    columns = (
        "features", "answered", "left", "aborted", "refused", "retractions", "cached", "compared", "largest difference",
        "ties", "more than 1e-4", "s", "survived",
    )  # fmt: skip
    rows = [
        (
            ", ".join(one.features),
            *(str(one.ends.get(end, 0)) for end in ("answered", "left", "aborted", "refused")),
            str(one.retractions),
            f"{one.cached:.2f}",
            str(one.compared),
            f"{one.largest:.1e}",
            str(one.ties),
            f"{one.above}{' (documented)' if one.inexact and one.above else ''}",
            f"{one.wall_s:.0f}",
            "no" if one.problems else "yes",
        )
        for one in storms(results).values()
    ]
    return Table("storms: requests by their end, and answers compared with a quiet server's", columns, rows)


def _refusals(results: Results) -> Table:
    """One row for each reason, with the pairs that it is given for."""
    by_reason: dict[str, list[Pair]] = {}
    for pair, reason in refused(results).items():
        by_reason.setdefault(reason, []).append(pair)
    rows = [
        ("; ".join(one if one == other else f"{one} with {other}" for one, other in pairs), reason)
        for reason, pairs in by_reason.items()
    ]
    return Table("refused", ("features", "the server's line"), rows)

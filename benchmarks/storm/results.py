"""The file of results and its tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import ResultFile
from benchmarks.harness.rows import Rows
from benchmarks.storm.features import HIDING
from benchmarks.storm.one_storm import Outcome
from benchmarks.storm.pairs import Pair, shown


def key(features: tuple[str, ...]) -> str:
    """The name of a storm."""
    return " + ".join(features)


class Results(ResultFile):
    """`storms`: outcomes by `key`. `refused`: pairs of features, or one feature twice, with the server's own line."""

    benchmark = "benchmarks.storm"

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        super().__init__(path, settings, about)
        self.storms: dict[str, Outcome] = {}
        self.refused: dict[Pair, str] = {}

    @property
    def known(self) -> set[str]:
        return set(self.storms)

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.storms.values() if one.problems]

    @property
    def survived(self) -> set[Pair]:
        """Pairs that were in a storm without problems."""
        return {pair for one in self.storms.values() if not one.problems for pair in shown(one.features, HIDING)}

    def read_entries(self, document: dict[str, Any]) -> None:
        tuples = ("features", "inexact")
        for one in document["storms"]:
            outcome = Outcome(**one | {name: tuple(one[name]) for name in tuples})
            self.storms[key(outcome.features)] = outcome
        self.refused = {(one["features"][0], one["features"][1]): one["reason"] for one in document["refused"]}

    def entries(self) -> dict[str, Any]:
        return {
            "storms": [asdict(one) for one in self.storms.values()],
            "refused": [{"features": pair, "reason": reason} for pair, reason in self.refused.items()],
        }


def tables(results: Results) -> list[Rows]:
    """Storms, and what was refused where that was asked."""
    return [table(results), *([refusal_table(results)] if results.refused else [])]


def table(results: Results) -> Rows:
    """One row for each storm."""
    columns = (
        "features", "answered", "left", "aborted", "refused", "retractions", "cached", "compared", "largest difference",
        "ties", "more than 1e-4", "s", "survived",
    )  # fmt: skip
    rows = []
    for one in results.storms.values():
        rows.append(
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
        )
    return Rows("storms: requests by their end, and answers beside a quiet server's", columns, tuple(rows))


def refusal_table(results: Results) -> Rows:
    """One row for each reason, with the pairs that it is given for."""
    by_reason: dict[str, list[Pair]] = {}
    for pair, reason in results.refused.items():
        by_reason.setdefault(reason, []).append(pair)
    rows = [
        ("; ".join(one if one == other else f"{one} with {other}" for one, other in pairs), reason)
        for reason, pairs in by_reason.items()
    ]
    return Rows("refused", ("features", "the server's line"), tuple(rows))

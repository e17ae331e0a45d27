"""Figures of one server's answers, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.conversations import Answered
from benchmarks.harness.table import Table

NO_HITS = "*"
"""Marks scores of a server that found nothing in its cache."""


@dataclass(frozen=True)
class Key:
    """One server: SGLang's pool ("token", all else None), or the ragged one with scorer, budgets and ratio."""

    pool: str
    scorer: str | None = None
    budgets: str | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        if self.pool == "token":
            return "token pool"
        return f"{self.scorer}, {self.budgets}, ratio {self.ratio:g}"


TOKEN = Key("token")


@dataclass(frozen=True)
class Cell:
    """Answers of one server.

    Attributes:
        score: share of right answers; `low` and `high`: its 95 % interval (Wilson).
        cached: mean share of the prompt that came from the cache; None: not recorded.
        mean_share: kept / full KV of a segment, from /server_info; None for the token pool.
        profile: the server's line on where its budgets come from; None for the token pool, or not recorded.
        wall_s: seconds from starting the server to its end.
    """

    pool: str
    scorer: str | None
    budgets: str | None
    ratio: float | None
    score: float
    asked: int
    low: float
    high: float
    cached: float | None
    mean_share: float | None
    profile: str | None
    wall_s: float

    @property
    def key(self) -> Key:
        return Key(self.pool, self.scorer, self.budgets, self.ratio)


def cell_of(
    key: Key,
    answered: Sequence[Answered],
    *,
    mean_share: float | None,
    profile: str | None,
    wall_s: float,
) -> Cell:
    """Summarise the answers."""
    from scipy.stats import binomtest

    right = sum(one.right for one in answered)
    interval = binomtest(right, len(answered)).proportion_ci(method="wilson")
    cached = statistics.fmean(one.cached / one.prompt for one in answered)
    return Cell(
        *(key.pool, key.scorer, key.budgets, key.ratio),
        score=round(right / len(answered), 6),
        asked=len(answered),
        low=round(float(interval.low), 4),
        high=round(float(interval.high), 4),
        cached=round(cached, 4),
        mean_share=mean_share,
        profile=profile,
        wall_s=wall_s,
    )


def tables(settings: Mapping[str, Any], cells: Sequence[Cell]) -> list[Table]:
    """Scores by ratio, and cached shares where they are known."""
    asked = max((cell.asked for cell in cells), default=0)
    title = f"facts, {settings['model']}, segments of {settings['segment']}: {asked} questions (95 % interval)"
    made = [_by_ratio(title, cells, _score)]
    if any(cell.cached is not None for cell in cells):
        title = "cached / prompt tokens"
        made.append(_by_ratio(title, cells, lambda cell: "" if cell.cached is None else f"{cell.cached:.0%}"))
    return made


def notes(cells: Sequence[Cell]) -> list[str]:
    """Name servers that found nothing in their caches, a line each."""
    return [
        f"{NO_HITS} {cell.key}: no prompt found anything in the cache: nothing that was "
        "cached, compressed or not, was read again, so this is no measurement of a cache. More --kv-bytes, fewer "
        "--max-running-requests?"
        for cell in cells
        if cell.cached == 0
    ]


def _score(cell: Cell) -> str:
    return f"{cell.score:.3f} ({cell.low:.2f}-{cell.high:.2f}){NO_HITS if cell.cached == 0 else ''}"


def _by_ratio(title: str, cells: Sequence[Cell], text: Callable[[Cell], str]) -> Table:
    """One row for the token pool, which stands in every column, and one for each scorer and budgets."""
    by_key = {cell.key: cell for cell in cells}
    ratios = sorted({key.ratio for key in by_key if key.ratio is not None}, reverse=True)
    columns = ["scorer, budgets", *(f"ratio {ratio:g}" for ratio in ratios)]
    rows = []
    if TOKEN in by_key:
        columns += [] if ratios else ["uncompressed"]
        rows.append(["token pool", *[text(by_key[TOKEN])] * max(1, len(ratios))])
    for scorer, budgets in dict.fromkeys((key.scorer, key.budgets) for key in by_key if key != TOKEN):
        keys = [Key("ragged", scorer, budgets, ratio) for ratio in ratios]
        rows.append([f"{scorer}, {budgets}", *(text(by_key[key]) if key in by_key else "" for key in keys)])
    return Table(title, columns, rows)

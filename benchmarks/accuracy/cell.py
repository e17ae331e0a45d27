"""The figures of one server's answers: a cell for each task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy.asking import AnsweredQuestion
from benchmarks.accuracy.intervals import interval, of_mean


@dataclass(frozen=True)
class Key:
    """Which server: SGLang's pool ("token", all else None), or the ragged one with its scorer, budgets and ratio."""

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
    """One server's answers to the questions of one task.

    Attributes:
        score: mean of the scores; `low` and `high`: its 95 % interval.
        cached: mean share of the prompt that came from the cache, over prompts that could hit; None: no prompt could.
        mean_share: kept / full KV of a segment, as /server_info has it; None for the token pool.
        profile: digest of the profile that the budgets come from; None: none, or not recorded.
        wall_s: seconds from starting the server to its end, of all tasks together.
    """

    pool: str
    scorer: str | None
    budgets: str | None
    ratio: float | None
    task: str
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


@dataclass(frozen=True)
class Mean:
    """The mean over the tasks of one server, each with the same weight, and its 95 % interval."""

    score: float
    low: float
    high: float


def cells_of(
    key: Key,
    asked: Sequence[AnsweredQuestion],
    *,
    segment: int,
    mean_share: float | None,
    profile: str | None,
    wall_s: float,
) -> list[Cell]:
    """One cell for each task, in the order in which they are first asked for."""
    made = []
    for task in dict.fromkeys(one.task for one in asked):
        own = [one for one in asked if one.task == task]
        scores = [one.score for one in own]
        low, high = interval([one.session for one in own], scores)
        shares = [one.cached / one.prompt for one in own if could_hit(one, segment)]
        made.append(
            Cell(
                pool=key.pool,
                scorer=key.scorer,
                budgets=key.budgets,
                ratio=key.ratio,
                task=task,
                score=round(statistics.fmean(scores), 6),
                asked=len(own),
                low=round(low, 4),
                high=round(high, 4),
                cached=round(statistics.fmean(shares), 4) if shares else None,
                mean_share=mean_share,
                profile=profile,
                wall_s=wall_s,
            )
        )
    return made


def could_hit(asked: AnsweredQuestion, segment: int) -> bool:
    """Whether more of the prompt was sent before than one segment: the ragged pool shares whole segments only.

    The same prompts count for the token pool, which could share fewer tokens.
    """
    return asked.sent_before > segment


def mean_of(cells: Sequence[Cell]) -> Mean:
    """Over the tasks of one server."""
    scores = [cell.score for cell in cells]
    low, high = of_mean(scores, [cell.low for cell in cells], [cell.high for cell in cells])
    return Mean(statistics.fmean(scores), low, high)


def by_key(cells: Sequence[Cell]) -> dict[Key, list[Cell]]:
    """The cells of each server, in the order of the file."""
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key, []).append(cell)
    return found


def without_hits(cells: Sequence[Cell]) -> list[Key]:
    """Servers that found nothing in their caches although prompts could hit: they measured something else."""
    shares = {key: [cell.cached for cell in own if cell.cached is not None] for key, own in by_key(cells).items()}
    return [key for key, found in shares.items() if found and not any(found)]

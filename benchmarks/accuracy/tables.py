"""The tables of a sweep, as rows of text: for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.accuracy.cell import TOKEN, Cell, Key, by_key, mean_of, without_hits
from benchmarks.harness.rows import Rows

NO_HITS = "*"
"""Beside scores of a server that found nothing in its cache."""


def tables(settings: dict[str, Any], cells: Sequence[Cell]) -> list[Rows]:
    """Scores by ratio; by task where there are several; cached shares where they are known."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    counts = {cell.task: cell.asked for cell in cells}
    what = f"mean over {len(tasks)} tasks" if len(tasks) > 1 else " ".join(tasks)
    title = (
        f"{settings['suite']} on {settings['model']}, segments of {settings['segment']}: {what}, "
        f"{sum(counts.values())} questions (95 % interval)"
    )
    missed = set(without_hits(cells))

    def score(key: Key, own: list[Cell]) -> str:
        mean = mean_of(own)
        return _score(mean.score, mean.low, mean.high) + (NO_HITS if key in missed else "")

    made = [_by_ratio(title, cells, score)]
    if len(tasks) > 1:
        made.append(_by_task(counts, cells))
    if any(cell.cached is not None for cell in cells):
        made.append(_by_ratio("cached / prompt tokens, of the prompts that could hit", cells, _cached))
    return made


def notes(cells: Sequence[Cell]) -> list[str]:
    """What has to be known beside the tables, a line each."""
    return [
        f"{NO_HITS} {key}: no prompt found anything in the cache, although every one could: nothing that was cached, "
        "compressed or not, was read again, so this is no measurement of a cache. More --kv-bytes, fewer "
        "--max-running-requests?"
        for key in without_hits(cells)
    ]


def _by_ratio(title: str, cells: Sequence[Cell], text: Callable[[Key, list[Cell]], str]) -> Rows:
    """One row for the token pool, which has no ratio and stands in every column, and for each scorer and budgets."""
    found = by_key(cells)
    ratios = sorted({key.ratio for key in found if key.ratio is not None}, reverse=True)
    columns = ("scorer, budgets", *(f"ratio {ratio:g}" for ratio in ratios))
    rows = []
    if TOKEN in found:
        columns = columns if ratios else (*columns, "uncompressed")
        rows.append(("token pool", *[text(TOKEN, found[TOKEN])] * max(1, len(ratios))))
    for scorer, budgets in dict.fromkeys((key.scorer, key.budgets) for key in found if key != TOKEN):
        row = [Key("ragged", scorer, budgets, ratio) for ratio in ratios]
        texts = [text(key, found[key]) if key in found else "" for key in row]
        if any(texts):
            rows.append((f"{scorer}, {budgets}", *texts))
    return Rows(title, columns, tuple(rows))


def _by_task(counts: dict[str, int], cells: Sequence[Cell]) -> Rows:
    """One row for each server, one column for each task; `counts`: questions of each."""
    rows = []
    for key, own in by_key(cells).items():
        of_task = {cell.task: cell for cell in own}
        texts = [_score(c.score, c.low, c.high) if (c := of_task.get(task)) else "" for task in counts]
        rows.append((str(key), *texts))
    columns = tuple(f"{task} ({count})" for task, count in counts.items())
    return Rows("by task (questions)", ("server", *columns), tuple(rows))


def _score(score: float, low: float, high: float) -> str:
    return f"{score:.3f} ({low:.2f}-{high:.2f})"


def _cached(_: Key, own: Sequence[Cell]) -> str:
    """Mean over the tasks that had prompts that could hit."""
    shares = [cell.cached for cell in own if cell.cached is not None]
    return f"{sum(shares) / len(shares):.0%}" if shares else ""

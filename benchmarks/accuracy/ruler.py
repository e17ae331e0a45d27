"""RULER (arXiv 2404.06654): its prepared files, each line a text with one question.

RULER writes them to `<length>/data/<task>/validation.jsonl`, for the model and the lengths that it was called with.
kvpress reads Parquet files of one length and all tasks, with columns of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy import files, metrics, records
from benchmarks.accuracy.records import Record
from benchmarks.accuracy.session import Question, Session, SuiteError

NAMES = ("validation.jsonl", "test.jsonl")


@dataclass(frozen=True)
class _Family:
    """What tasks have in common whose names begin alike. `metric` takes an answer and the line's `outputs`."""

    new_tokens: int
    metric: Callable[[str, Sequence[str]], float]


_FAMILIES = {
    "niah": _Family(128, metrics.contains_all),
    "vt": _Family(30, metrics.contains_all),
    "cwe": _Family(120, metrics.contains_all),
    "fwe": _Family(50, metrics.contains_all),
    "qa": _Family(32, metrics.contains_any),
}


def load(data: Path, tasks: Sequence[str] | None, limit: int | None) -> list[Session]:
    """A session for each line, by length and task.

    Args:
        data: one of RULER's files, or a folder that has them anywhere below it; or a Parquet file as kvpress has them.
        tasks: with or without their length (`4096/vt`, `vt`); None: all that are found.
        limit: lines of each task, at most; None: all.

    Raises:
        SuiteError: no such files or tasks, or a line that cannot be used.
    """
    records.check_limit(limit)
    sessions = []
    if data.suffix == ".parquet":
        for task, rows in files.chosen(_by_task(data), tasks).items():
            sessions += [_row_session(task, number, row) for number, row in enumerate(rows[:limit], start=1)]
        return sessions
    for task, path in files.chosen(_find(data), tasks).items():
        lines = records.read([path], limit)
        sessions += [_session(task, number, line) for number, line in enumerate(lines, start=1)]
    return sessions


def _by_task(data: Path) -> dict[str, list[Record]]:
    """The rows of a file of kvpress by task, in the order in which tasks appear."""
    found: dict[str, list[Record]] = {}
    for row in records.read(files.candidates(data)):
        found.setdefault(row.text("task"), []).append(row)
    return found


def _row_session(task: str, number: int, row: Record) -> Session:
    """The session of a row of kvpress, named by the row's number among those of its task.

    A line break separates the question from the beginning of its answer, as kvpress has it without a chat template.
    """
    family = _FAMILIES.get(_family(task))
    if family is None:
        raise row.wrong(f'"task" must begin with one of {", ".join(_FAMILIES)}')
    prefix = row.text("answer_prefix") if row.fields.get("answer_prefix") else ""
    answers = row.text_or_texts("answer")
    score = functools.partial(_score, metric=family.metric, outputs=answers)
    text, new_tokens = f"{row.text('question')}\n{prefix}", int(row.number("max_new_tokens"))
    return Session(
        f"{task}/{number}", row.text("context"), (Question(task, text, ", ".join(answers), new_tokens, score),)
    )


def _find(data: Path) -> dict[str, Path]:
    """A file for each task, shorter lengths first. Folders that are not called like a task are passed over."""
    given = data.is_file()
    paths = [path for path in files.candidates(data) if given or path.name in NAMES]
    paths = [path for path in paths if _family(path.absolute().parent.name) in _FAMILIES]
    if not paths:
        wanted = f"<task>/{' and <task>/'.join(NAMES)}, where <task> begins with {', '.join(_FAMILIES)}"
        raise SuiteError(f"{data} has no file of RULER: looked for {wanted}")
    found: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (int(_length(path) or 0), path)):
        length, folder = _length(path), path.absolute().parent.name
        task = f"{length}/{folder}" if length else folder
        if task in found:
            raise SuiteError(f"{found[task]} and {path} both hold {task}: give a folder that has one of them")
        found[task] = path
    return found


def _family(task: str) -> str:
    return task.partition("_")[0]


def _length(path: Path) -> str | None:
    """The folder `<length>` of `<length>/data/<task>/<file>`, None in another layout."""
    # Not resolved: a cache of downloads links to files whose folders say nothing.
    parts = path.absolute().parts
    return parts[-4] if len(parts) > 4 and parts[-3] == "data" and parts[-4].isdecimal() else None


def _session(task: str, number: int, line: Record) -> Session:
    """The session of a line, named by the line's number among those of its file: an index need not be there."""
    context, text = _split(line)
    outputs = line.texts("outputs")
    family = _FAMILIES[_family(task.rpartition("/")[2])]
    score = functools.partial(_score, metric=family.metric, outputs=outputs)
    return Session(f"{task}/{number}", context, (Question(task, text, ", ".join(outputs), family.new_tokens, score),))


def _split(line: Record) -> tuple[str, str]:
    """Text and question; one after the other, they are the line's `input` and `answer_prefix` as they are.

    The question is the last line of `input`, else its last sentence. White space at its end separates nothing.
    """
    prompt = line.text("input")
    prefix = line.text("answer_prefix") if line.fields.get("answer_prefix") else ""
    end = len(prompt.rstrip())
    at = prompt.rfind("\n", 0, end)
    if at < 0:
        at = prompt.rfind(". ", 0, end) + 1
    if at <= 0:
        raise line.wrong('"input" must have a text, then a question on a line or in a sentence of its own')
    return prompt[:at], prompt[at:] + prefix


def _score(prediction: str, metric: Callable[[str, Sequence[str]], float], outputs: Sequence[str]) -> float:
    return metric(metrics.printable(prediction), outputs)

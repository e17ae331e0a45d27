"""SCBench (arXiv 2412.10319, microsoft/SCBench on Hugging Face): long contexts with several questions each.

Metrics are SCBench's own (`metrics.py`, `repoqa.py`). Prompts are worded here (`scbench_prompts.py`), so that pools are
to be compared with each other, not with published tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import files, metrics, records, repoqa, scbench_prompts
from benchmarks.accuracy.packages import imported
from benchmarks.accuracy.records import Record
from benchmarks.accuracy.repoqa import Needle
from benchmarks.accuracy.scbench_tasks import MIXED, NEW_TOKENS, PREFIX, find
from benchmarks.accuracy.session import Question, Session

Score = Callable[[str], float]
_Needles = Mapping[str, Sequence[Needle]]
"""By repository, the functions that some turn of the task asks for."""


def load(data: Path, tasks: Sequence[str] | None, limit: int | None) -> list[Session]:
    """A session for each record, by task.

    Args:
        data: a file `scbench_<task>.jsonl` or `.parquet`, or a folder that has them, or a download of the dataset,
            anywhere below it.
        tasks: with or without `scbench_`; None: all that are found.
        limit: records of each task, at most; None: all.

    Raises:
        SuiteError: no such files or tasks, a record that cannot be used, or a package that scoring needs is missing.
    """
    records.check_limit(limit)
    wanted = None if tasks is None else [task.removeprefix(PREFIX) for task in tasks]
    return [
        session for task, paths in files.chosen(find(data), wanted).items() for session in _sessions(task, paths, limit)
    ]


def _sessions(task: str, paths: Sequence[Path], limit: int | None) -> list[Session]:
    has_needles = "repoqa" in (task, *MIXED.get(task, ()))
    # A limit makes a run shorter, not its questions easier: needles come from all records.
    found = records.read(paths, None if has_needles else limit)
    needles = _needles(task, found) if has_needles else {}
    return [_session(task, number, record, needles) for number, record in enumerate(found[:limit], start=1)]


def _session(task: str, number: int, record: Record, needles: _Needles) -> Session:
    """The session of a record, named by its number in the task: ids need not be there, nor be unique."""
    context = scbench_prompts.context(task, record)
    questions = tuple(_question(task, record, turn, needles) for turn in _turns(record))
    return Session(f"{task}/{number}", context, questions, may_be_cut=True)


def _turns(record: Record) -> tuple[Record, ...]:
    return record.parts("multi_turns", "turn")


def _question(task: str, record: Record, turn: Record, needles: _Needles) -> Question:
    kind = _kind(task, turn)
    score = _repoqa(record, turn, needles) if kind == "repoqa" else _SCORES[kind](turn)
    return Question(
        task=f"{task}/{kind}" if task in MIXED else task,
        text=scbench_prompts.text(kind, turn),
        answer=_answer(turn),
        new_tokens=MIXED[task][kind] if task in MIXED else NEW_TOKENS[task],
        score=score,
    )


def _kind(task: str, turn: Record) -> str:
    """What kind of question a turn asks: the task, or what the turn itself says in a mixed one. Raises SuiteError."""
    if task not in MIXED:
        return task
    kind = turn.text("task").removeprefix(PREFIX)
    if kind not in MIXED[task]:
        raise turn.wrong(f'"task" must be one of {", ".join(PREFIX + kind for kind in MIXED[task])}')
    return kind


def _answer(turn: Record) -> str:
    """The reference as text. Its type is right: the turn's score was made of it."""
    value = turn.fields["answer"]
    return ", ".join(value) if isinstance(value, list) else str(value)


def _needles(task: str, found: Sequence[Record]) -> dict[str, list[Needle]]:
    """The functions of each repository, each once."""
    needles: dict[str, dict[Needle, None]] = {}
    for record in found:
        for turn in _turns(record):
            if _kind(task, turn) == "repoqa":
                needle = Needle(turn.text("name"), turn.text("answer"))
                needles.setdefault(record.text("repo"), {})[needle] = None
    return {repository: list(once) for repository, once in needles.items()}


def _repoqa(record: Record, turn: Record, needles: _Needles) -> Score:
    language = record.text("lang")
    if language not in repoqa.LANGUAGES:
        raise record.wrong(f'"lang" must be one of {", ".join(repoqa.LANGUAGES)}')
    repoqa.check_packages(language)
    asked = turn.text("name")
    return functools.partial(repoqa.right, needles=needles[record.text("repo")], asked=asked, language=language)


def _label(turn: Record) -> Score:
    return functools.partial(metrics.contains, reference=turn.text("answer"))


def _all(turn: Record) -> Score:
    return functools.partial(metrics.contains_all, references=turn.text_or_texts("answer"))


def _any(turn: Record) -> Score:
    # SCBench iterates over the characters of a label that is a plain string (many_shot), so that almost every answer is
    # right. Here the whole label has to occur.
    return functools.partial(metrics.contains_any, references=turn.text_or_texts("answer"))


def _letter(turn: Record) -> Score:
    options, option = scbench_prompts.options(turn), turn.text("answer")
    if option not in options:
        raise turn.wrong('"answer" must be one of "options", word for word')
    return functools.partial(metrics.chosen_letter, letter=metrics.LETTERS[options.index(option)], option=option)


def _f1_chinese(turn: Record) -> Score:
    return functools.partial(metrics.f1_chinese, references=turn.text_or_texts("answer"))


def _number(turn: Record) -> Score:
    return functools.partial(metrics.first_number, reference=turn.number("answer"))


def _integer(turn: Record) -> Score:
    answer = turn.fields.get("answer")
    label = str(answer) if type(answer) is int else turn.text("answer")
    return functools.partial(metrics.first_integer, reference=label)


def _rouge(turn: Record) -> Score:
    # A missing package is to be seen before anything is generated.
    imported("rouge_score.rouge_scorer")
    return functools.partial(metrics.rouge_lsum, reference=turn.text("answer"))


_SCORES: dict[str, Callable[[Record], Score]] = {
    "choice_eng": _letter,
    "qa_eng": _any,
    "qa_chn": _f1_chinese,
    "kv": _label,
    "kv_hard": _label,
    "kv_compressible": _label,
    "hashhop": _label,
    "prefix_suffix": _label,
    "mf": _number,
    "passkey": _integer,
    "summary": _rouge,
    "vt": _all,
    "many_shot": _any,
}
"""By kind, what makes the score of a turn's question; each raises SuiteError when the turn lacks what it needs."""

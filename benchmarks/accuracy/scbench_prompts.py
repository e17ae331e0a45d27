"""How SCBench's contexts and questions are worded here.

The wording is ours. So scores are to be compared between pools and settings of this benchmark, not with published
tables.
"""

from __future__ import annotations

import re

from benchmarks.accuracy.metrics import LETTERS
from benchmarks.accuracy.records import Record

_JSON = "A JSON object follows. You are going to be asked for the values of some of its keys."
_INSTRUCTIONS = {
    "kv": _JSON,
    "kv_hard": _JSON,
    "kv_compressible": "A text follows that gives values to keys. You are going to be asked for some of the values.",
    "passkey": "A long text follows in which something of importance is hidden. You are going to be asked for it.",
    "choice_eng": "A book follows, then questions about it. Answer each with the letter of the right option.",
    "qa_eng": "A book follows, then questions about it. Answer each in a few words, without a sentence around them.",
    "qa_chn": "下面是一本书，书后有若干问题。请根据书的内容作答，答案要尽量简短。",  # noqa: RUF001
    "repoqa": "The source code of a repository follows. You are going to be given descriptions of single functions. "
    "Find the function that is described and repeat it exactly as it stands there, in a code block fenced by ```.",
    "mf": "A list of numbers follows, then questions about it. Answer each with a number and nothing else.",
}
"""Instructions before a task's context; the contexts of the other tasks contain their own."""

_STATISTIC = re.compile(r"\bThe (.+) is\b")


def context(task: str, record: Record) -> str:
    """The session's text: the instruction, a blank line, and the record's context. Raises SuiteError."""
    own = _own_context(task, record)
    return f"{_INSTRUCTIONS[task]}\n\n{own}" if task in _INSTRUCTIONS else own


def text(kind: str, turn: Record) -> str:
    """A turn's question, after a blank line. Raises SuiteError."""
    asked = turn.text("input")
    if kind == "qa_eng":
        asked = f"Question: {asked}\nAnswer:"
    elif kind == "qa_chn":
        asked = f"问题：{asked}\n回答："  # noqa: RUF001
    elif kind == "choice_eng":
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options(turn), strict=True)]
        asked = "\n".join([f"Question: {asked}", *lines, "The right letter is"])
    elif kind == "mf":
        statistic = _STATISTIC.search(asked)
        asked = f"What is the {statistic[1]}?\n\n{asked}" if statistic else asked
    return f"\n\n{asked}"


def options(turn: Record) -> tuple[str, ...]:
    """The four texts to choose from. Raises SuiteError when there are not four."""
    found = turn.texts("options")
    if len(found) != len(LETTERS):
        raise turn.wrong(f'"options" must be {len(LETTERS)} strings')
    return found


def _own_context(task: str, record: Record) -> str:
    # Tasks that were made from RULER's files call it as RULER does.
    name = "context" if record.has("context") else "input" if record.has("input") else "context"
    numbers = record.fields.get(name)
    if task == "mf" and isinstance(numbers, list):
        if not numbers or not all(type(number) is int for number in numbers):
            raise record.wrong(f'"{name}" must be a list of integers that is not empty')
        return str(numbers)
    return record.text(name)

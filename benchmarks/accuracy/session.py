"""What a suite asks: texts that several questions are asked about, and how an answer is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.errors import BenchmarkError


class SuiteError(BenchmarkError):
    """The data or options of a suite cannot be used."""


@dataclass(frozen=True)
class Question:
    """One question about a session's context.

    `text` follows the context, or the answer before it, as it is: line breaks in between are part of it. `answer` is
    the reference, as the next turn of a conversation holds it. `score` takes the text of an answer and returns a share
    in [0, 1]; `task` is what scores are averaged under.
    """

    task: str
    text: str
    answer: str
    new_tokens: int
    score: Callable[[str], float]


@dataclass(frozen=True)
class Session:
    """A context and the questions about it. `may_be_cut`: a context that is too long may lose its middle."""

    name: str
    context: str
    questions: tuple[Question, ...]
    may_be_cut: bool = False

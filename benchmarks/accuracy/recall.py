"""The recall suite: facts of conversations in the recall model's language, asked for afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.accuracy.session import Question, Session, SuiteError
from benchmarks.recall.questions import Interview, interviews
from benchmarks.recall.task import ASSISTANT, EOS, QUESTION, USER, VOCABULARY, Fact

TASK = "facts"


def load(conversations: int, questions: int, seed: int) -> list[Session]:
    """Conversations of 2,049 tokens, each with `questions` of its facts that no turn of it asks for.

    Raises:
        SuiteError: less than one conversation or question, or a negative seed.
    """
    if conversations < 1 or questions < 1 or seed < 0:
        raise SuiteError("--conversations and --questions must be at least 1, --seed must not be negative")
    talks = interviews(conversations, questions, seed=seed)
    return [_session(f"conversation {number + 1}", talk) for number, talk in enumerate(talks)]


def check_language(tokenizer: Any) -> None:
    """Raises SuiteError unless the tokenizer has one token for each word of the recall model's language."""
    ids = tokenizer(" ".join(VOCABULARY), add_special_tokens=False).input_ids
    if list(ids) != list(range(len(VOCABULARY))):
        raise SuiteError(
            "--suite recall is in the recall model's language, which the tokenizer of --model does not have"
        )


def _session(name: str, talk: Interview) -> Session:
    words = [VOCABULARY[token] for token in talk.history]
    return Session(name, " ".join(words), tuple(_question(fact) for fact in talk.facts))


def _question(fact: Fact) -> Question:
    text = f" {USER} {QUESTION} {fact.key} {ASSISTANT}"
    return Question(TASK, text, f"{fact.value} {EOS}", 1, _first_word_is(fact.value))


def _first_word_is(value: str) -> Callable[[str], float]:
    return lambda said: float(said.split()[:1] == [value])

"""What is asked: contexts that leave the device and come back, how they go on, and questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality import facts, texts
from benchmarks.recall import questions

SUITES = ("texts", "recall")


@dataclass(frozen=True)
class Question:
    """Token ids behind the context, and the answer's text."""

    ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Talk:
    """A context. `continuation`: token ids that go on with it, or none. `kind`: of its questions, if it has any."""

    kind: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    questions: tuple[Question, ...]

    def whole(self, segment: int) -> int:
        """Tokens of the context that are in whole segments."""
        return len(self.context) // segment * segment


def from_texts(tokenizer: Any, count: int, *, segment: int) -> list[Talk]:
    """The texts of benchmarks.quality, five segments of which the last goes on, and `count` interviews of each kind."""
    talks = [
        Talk(text.source, text.ids[: 4 * segment], text.ids[4 * segment :], ())
        for text in texts.pieces(tokenizer, 5 * segment)
    ]
    for kind in facts.KINDS:
        for one in facts.interviews(tokenizer, kind, count, facts=8, length=800):
            asked = tuple(Question(question.suffix, question.answer) for question in one.questions)
            talks.append(Talk(kind, one.context, (), asked))
    return talks


def from_recall(count: int, *, segment: int) -> list[Talk]:
    """`count` conversations in the recall model's language, of 2,049 tokens, with eight facts asked for afterwards.

    Others of the same length go on with their last segment.
    """
    talks = []
    for one in questions.interviews(count, 8, seed=0):
        asked = tuple(Question(tuple(one.prompt(fact)[len(one.history) :]), fact.value) for fact in one.facts)
        talks.append(Talk("facts", one.history, (), asked))
    for one in questions.interviews(count, 0, seed=1000):
        # A continuation ends with its segment: a longer one would be in the cache itself the second time.
        end = len(one.history) // segment * segment
        talks.append(Talk("conversation", one.history[: end - segment], one.history[end - segment : end], ()))
    return talks


def is_right(suite: str, answer: str, said: str) -> bool:
    """Whether what was said is the answer. Words of the recall model are whole words."""
    return said.split()[:1] == [answer] if suite == "recall" else facts.is_right(answer, said)


def kinds(talks: Sequence[Talk]) -> list[str]:
    """Kinds of talks with questions, in order."""
    return list(dict.fromkeys(talk.kind for talk in talks if talk.questions))


def pool_tokens(talks: Sequence[Talk], segment: int) -> int:
    """A device's pool that two talks fit into, and no more: what was read before the last ones has left it."""
    longest = max(len(talk.context) + max(len(talk.continuation), ANSWER_ROOM) for talk in talks)
    return (2 * -(-longest // segment) + 1) * segment


ANSWER_ROOM = 128
"""Tokens of a question and its answer."""

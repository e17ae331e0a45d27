"""Facts hidden in real text, and questions for them behind it: numbers and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.quality.texts import SOURCES, first_token, read

STATEMENTS = {
    "numbers": (
        *("The phone extension of the bakery is", "The number of Maria's locker is", "The code of the harbour gate is"),
        *(
            "The invoice for the piano has the number",
            "The room of Doctor Brown is room",
            "The train to Geneva is train",
        ),
        *(
            "The account of the museum is account",
            "The combination of the old safe is",
            "The badge of Officer Harris says",
        ),
        *(
            "The lottery ticket of my uncle is ticket",
            "The weight of the bronze statue is",
            "The licence of the taxi is",
        ),
    ),
    "words": (
        *("The password of the wireless network is", "The name of Peter's boat is", "The codeword for the meeting is"),
        *("The label on the blue bottle says", "The name of the black horse is", "The prize of the contest was a"),
        *("The animal on the town's flag is a", "The secret ingredient of the soup is", "The title of the painting is"),
        *("The nickname of the new teacher is", "The thing in the wooden box is a", "The last word of the poem is"),
    ),
}
"""Beginnings of sentences that a fact ends, by kind."""

WORDS = (
    *("apple", "river", "candle", "window", "tiger", "bottle", "silver", "monkey", "garden", "pencil", "mountain"),
    *(
        "butter",
        "rocket",
        "mirror",
        "dolphin",
        "ladder",
        "ticket",
        "blanket",
        "carrot",
        "diamond",
        "elephant",
        "forest",
    ),
    *("guitar", "hammer", "iceberg", "jacket", "kitten", "lemon", "mushroom", "needle", "orange", "pillow", "rabbit"),
)
KINDS = tuple(STATEMENTS)
INTRODUCTION = "Read the following text.\n\n"
QUESTION = "Quote a sentence that does not belong to the text."
"""It does not quote the beginning of the sentence: a model that copies would continue from there."""


@dataclass(frozen=True)
class Question:
    """`suffix`: tokens behind the context, up to where the answer begins."""

    suffix: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Interview:
    """A context, and questions about it that are asked each on its own. `kind`: one of KINDS."""

    kind: str
    source: str
    context: tuple[int, ...]
    questions: tuple[Question, ...]


def interviews(tokenizer: Any, kind: str, count: int, *, facts: int, length: int, seed: int = 0) -> list[Interview]:
    """`count` interviews about contexts of about `length` tokens, from all sources in turns.

    Each fact ends a sentence; the user asks for the sentence, and the answer is begun with it: a model that is too
    small to be asked freely has only to find the fact. A model without a chat template reads all of it as one text.
    """
    made = []
    for number in range(count):
        rng = np.random.default_rng([seed, KINDS.index(kind), number])
        source = list(SOURCES)[number % len(SOURCES)]
        begun = [STATEMENTS[kind][i] for i in rng.permutation(len(STATEMENTS[kind]))[:facts]]
        if kind == "numbers":
            answers = [str(int(value)) for value in rng.choice(9000, facts, replace=False) + 1000]
        else:
            answers = [WORDS[i] for i in rng.permutation(len(WORDS))[:facts]]
        text = _with_facts(rng, tokenizer, source, list(zip(begun, answers, strict=True)), length)
        content, first = f"{INTRODUCTION}{text}\n\n@@{QUESTION}", ()
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": content}]
            content = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            content, first = f"{content}\n\n", first_token(tokenizer)
        before, _, behind = content.partition("@@")
        context = [*first, *tokenizer.encode(before, add_special_tokens=False)]
        questions = []
        for beginning, answer in zip(begun, answers, strict=True):
            asked = behind + beginning
            questions.append(Question(tuple(tokenizer.encode(asked, add_special_tokens=False)), answer))
        made.append(Interview(kind, source, tuple(context), tuple(questions)))
    return made


def _with_facts(
    rng: np.random.Generator, tokenizer: Any, source: str, facts: list[tuple[str, str]], length: int
) -> str:
    """A piece of the source in equal parts, a fact behind each."""
    ids = tokenizer.encode(read(source), add_special_tokens=False)
    start = int(rng.integers(len(ids) - length))
    borders = np.linspace(start, start + length, len(facts) + 1).astype(int)
    parts = []
    for (beginning, answer), first, last in zip(facts, borders[:-1], borders[1:], strict=True):
        parts.append(f"{tokenizer.decode(ids[first:last])}\n{beginning} {answer}.\n")
    return "".join(parts)


def is_right(answer: str, said: str) -> bool:
    """Whether the answer is the first thing said, whatever its case and the punctuation before it."""
    return said.lstrip(" \n*\"'`:").lower().startswith(answer.lower())

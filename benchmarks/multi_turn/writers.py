"""Messages of exact length in tokens: facts and questions in the recall model's language, else random words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.errors import SettingsError
from benchmarks.recall import task


@dataclass(frozen=True)
class Story:
    """What a conversation may still say: keys that no fact of it has used, facts that nobody has asked for."""

    keys: tuple[str, ...] = ()
    unasked: tuple[task.Fact, ...] = ()


@dataclass(frozen=True)
class Text:
    """One message, the word that answers it (None: it has no known answer), and the conversation after it."""

    content: str
    answer: str | None
    story: Story


class Writer(Protocol):
    """Writes messages of a given length. The same generator state gives the same text."""

    def begin(self, rng: np.random.Generator) -> Story:
        """A conversation in which nothing was said."""
        ...

    def message(self, rng: np.random.Generator, story: Story, tokens: int, *, facts: int, ask: bool) -> Text:
        """A message of `tokens` tokens that states up to `facts` facts and, with `ask`, ends with a question."""
        ...


class RecallWriter:
    """Messages in the language of the recall model, so that answers can be checked."""

    def begin(self, rng: np.random.Generator) -> Story:
        return Story(keys=tuple(task.KEYS[i] for i in rng.permutation(len(task.KEYS))))

    def message(self, rng: np.random.Generator, story: Story, tokens: int, *, facts: int, ask: bool) -> Text:
        # A fact takes at most four words; a question two, and something has to stand between.
        count = max(0, min(facts, (tokens - 2) // 5, len(story.keys)))
        stated = tuple(
            task.Fact(
                key, task.VALUES[rng.integers(len(task.VALUES))], task.KINDS[rng.integers(len(task.KINDS))], turn=0
            )
            for key in story.keys[:count]
        )
        # A fact of this message is asked for only where there is no older one.
        candidates = (story.unasked or stated) if ask and tokens > 2 else ()
        asked = candidates[int(rng.integers(len(candidates)))] if candidates else None
        filler = tokens - sum(len(fact.words) for fact in stated) - (2 if asked else 0)
        pieces = [*(fact.words for fact in stated), *task.filler_sentences(rng, filler)]
        words = [word for i in rng.permutation(len(pieces)) for word in pieces[i]]
        words += (task.QUESTION, asked.key) if asked else ()
        unasked = tuple(fact for fact in (*story.unasked, *stated) if fact is not asked)
        after = replace(story, keys=story.keys[count:], unasked=unasked)
        return Text(" ".join(words), asked.value if asked else None, after)


class PlainWriter:
    """Random words of a tokenizer, for models that do not know the recall task's language."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        # Words with their space survive being decoded and read again as the same single token.
        self._words: Sequence[str] = sorted({p for p in pieces if p[:1] == " " and p[1:].isascii() and p[1:].isalpha()})
        if len(self._words) < 100:
            raise SettingsError("this model's tokenizer has too few whole words to write messages with")

    def begin(self, rng: np.random.Generator) -> Story:
        return Story()

    def message(self, rng: np.random.Generator, story: Story, tokens: int, *, facts: int, ask: bool) -> Text:
        text = "".join(self._words[i] for i in rng.integers(len(self._words), size=tokens))
        ids = self._tokenizer.encode(text.strip(), add_special_tokens=False)[:tokens]
        return Text(self._tokenizer.decode(ids), None, story)


def writer_for(model: str) -> Writer:
    """The recall model's language where the model's tokenizer is the recall model's, else random words."""
    vocabulary = Path(model) / "tokenizer.json"
    if vocabulary.is_file() and json.loads(vocabulary.read_text())["model"].get("vocab") == task.TOKEN_ID:
        return RecallWriter()
    from transformers import AutoTokenizer

    try:
        return PlainWriter(AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot load the tokenizer of --model {model}: {str(error).splitlines()[0]}") from None

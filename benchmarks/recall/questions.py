"""Questions about one long conversation, each asked on its own: prompts that share a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.recall.task import ASSISTANT, QUESTION, TOKEN_ID, USER, Fact, conversation, render


@dataclass(frozen=True)
class Interview:
    """A conversation as token ids, and facts in it that nobody has asked for yet."""

    history: tuple[int, ...]
    facts: tuple[Fact, ...]

    def prompt(self, fact: Fact) -> list[int]:
        """Token ids after which the model should say `fact.value`."""
        return [*self.history, *(TOKEN_ID[word] for word in (USER, QUESTION, fact.key, ASSISTANT))]


def interviews(count: int, questions: int, *, seed: int, turns: int = 8, tokens_per_turn: int = 256) -> list[Interview]:
    """`count` conversations with `questions` facts each, drawn from all that were stated before the last turn."""
    made = []
    for number in range(count):
        talk = conversation(seed + number, turns, tokens_per_turn)
        asked = {turn.asked for turn in talk.turns}
        free = [fact for fact in talk.facts if fact not in asked and fact.turn < turns - 1]
        chosen = np.random.default_rng([seed, number]).permutation(len(free))[:questions]
        made.append(Interview(tuple(render(talk).tolist()), tuple(free[i] for i in chosen)))
    return made

"""What is asked of a server: hidden states of texts, and facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.quality.facts import Interview, is_right
from benchmarks.quality.tasks import Tasks
from benchmarks.quality.texts import Text

ANSWER_TOKENS = 6

Read = TypeVar("Read")


@dataclass(frozen=True)
class Answers(Generic[Read]):
    """texts: what was read of every text. right: for each interview, which of its questions were answered rightly, in
    the order in which their facts stand in the context."""

    texts: list[Read]
    right: list[list[bool]]
    start_up: str


def ask(
    client: ServerClient,
    tasks: Tasks,
    tokenizer: Any,
    read: Callable[[ServerClient, Text], Read],
    advance: Callable[[], None],
) -> Answers[Read]:
    """All tasks, one after the other; `read` gives what is kept of a text. Raises ServerLost and PointFailed."""
    texts = []
    for text in tasks.texts:
        # Of cached tokens nothing is returned, and texts may begin with the same token.
        client.flush()
        texts.append(read(client, text))
        advance()
    return Answers(texts, recall(client, tokenizer, tasks.interviews, advance), client.start_up_line())


def hidden_states(client: ServerClient, text: Text) -> torch.Tensor:
    """float32 [tokens, hidden size]: what enters the head at every token of the text, in one prefill.

    Raises:
        ServerLost: the server went away.
        PointFailed: it refused the text, or returned something else.
    """
    answer = client.generate(text.ids, 1, return_hidden_states=True)
    states = torch.tensor(answer["meta_info"]["hidden_states"][0])
    if states.shape[0] != len(text.ids):
        raise PointFailed(f"the server returned hidden states of {states.shape[0]} of {len(text.ids)} tokens")
    return states


def recall(
    client: ServerClient, tokenizer: Any, interviews: Sequence[Interview], advance: Callable[[], None]
) -> list[list[bool]]:
    """For each interview, which of its questions were answered rightly. The context is sent alone first.

    Raises ServerLost and PointFailed.
    """

    def answers(interview: Interview) -> list[bool]:
        client.generate(interview.context, 1)
        found = []
        for question in interview.questions:
            said = client.generate([*interview.context, *question.suffix], ANSWER_TOKENS)
            found.append(is_right(question.answer, tokenizer.decode(said["output_ids"])))
            advance()
        return found

    return [answers(interview) for interview in interviews]

"""A server's answers about contexts on the device, and about the same when they have come back from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import SettingsError
from benchmarks.tier_codecs.suites import Talk

ANSWER_TOKENS = 6


@dataclass
class Answers:
    """Answers of a server.

    Attributes:
        states: float32 [tokens, hidden size], what enters the head along each continuation.
        said: token ids of each talk's answers.
        restored: tokens that came back from the host.
    """

    states: list[torch.Tensor] = field(default_factory=list)
    said: list[list[list[int]]] = field(default_factory=list)
    restored: int = 0


def read_contexts(
    client: ServerClient, talks: Sequence[Talk], segment: int, *, ask: bool, advance: Callable[[], None]
) -> Answers:
    """Send every context, so that it is backed up; with `ask`, continue it at once, from the device.

    Raises:
        ServerLost, PointFailed: the server does not answer.
        SettingsError: a context was in the cache already, or had left the device at once.
    """
    answers = Answers()
    for talk in talks:
        if client.generate(talk.context, 1)["meta_info"]["cached_tokens"]:
            raise SettingsError("two contexts begin with the same segment: their answers would not be independent")
        if ask and _continue(client, talk, segment, answers):
            raise SettingsError("a context left the device before it was continued: the pool is too small")
        advance()
    return answers


def continue_restored(
    client: ServerClient, talks: Sequence[Talk], segment: int, advance: Callable[[], None]
) -> Answers:
    """Continue every context after it has left the device.

    Raises:
        ServerLost, PointFailed: the server does not answer.
        SettingsError: a context was still on the device, in whole or in part.
    """
    answers = Answers()
    for talk in talks:
        restored = _continue(client, talk, segment, answers)
        if restored != talk.whole(segment):
            raise SettingsError(
                f"{restored} of {talk.whole(segment)} tokens came back from the host: the others never left the device"
            )
        answers.restored += restored
        advance()
    return answers


def _continue(client: ServerClient, talk: Talk, segment: int, answers: Answers) -> int:
    """Read the continuation and ask the questions of a talk; returns the tokens that came back from the host."""
    restored = 0
    if talk.continuation:
        answer = client.generate([*talk.context, *talk.continuation], 1, return_hidden_states=True)
        states = torch.tensor(answer["meta_info"]["hidden_states"][0])
        new = len(talk.context) - talk.whole(segment) + len(talk.continuation)
        if states.shape[0] != new:
            raise SettingsError(
                f"the server returned hidden states of {states.shape[0]} tokens, not of the {new} after the cached ones"
            )
        answers.states.append(states[-len(talk.continuation) :])
        restored += _from_host(answer)
    answers.said.append([])
    for question in talk.questions:
        answer = client.generate([*talk.context, *question.ids], ANSWER_TOKENS)
        answers.said[-1].append(answer["output_ids"])
        restored += _from_host(answer)
    return restored


def _from_host(answer: dict[str, Any]) -> int:
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("host", 0)

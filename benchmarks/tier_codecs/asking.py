"""What a server says to contexts on the device, and to the same when they have come back from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from benchmarks.harness.errors import ServerLost, SettingsError
from benchmarks.tier_codecs.suites import Talk

ANSWER_TOKENS = 6


@dataclass
class Answers:
    """states: float32 [tokens, hidden size], what enters the head along each continuation. said: token ids of each
    talk's answers. restored: tokens that came back from the host."""

    states: list[torch.Tensor] = field(default_factory=list)
    said: list[list[list[int]]] = field(default_factory=list)
    restored: int = 0


def read_contexts(url: str, talks: Sequence[Talk], segment: int, *, ask: bool, advance: Callable[[], None]) -> Answers:
    """Send every context, so that it is backed up; with `ask`, go on with it at once, from the device.

    Raises:
        ServerLost: the server does not answer, or answers something else.
        SettingsError: a context was in the cache already, or had left the device at once.
    """
    answers = Answers()
    for talk in talks:
        if _generate(url, talk.context, 1)["meta_info"]["cached_tokens"]:
            raise SettingsError("two contexts begin with the same segment: their answers would not be independent")
        if ask and _go_on(url, talk, segment, answers):
            raise SettingsError("a context left the device before it was gone on with: the pool is too small")
        advance()
    return answers


def go_on_restored(url: str, talks: Sequence[Talk], segment: int, advance: Callable[[], None]) -> Answers:
    """Go on with every context, which has left the device.

    Raises:
        ServerLost: the server does not answer, or answers something else.
        SettingsError: a context was still on the device, in whole or in part.
    """
    answers = Answers()
    for talk in talks:
        restored = _go_on(url, talk, segment, answers)
        if restored != talk.whole(segment):
            raise SettingsError(
                f"{restored} of {talk.whole(segment)} tokens came back from the host: the others never left the device"
            )
        answers.restored += restored
        advance()
    return answers


def _go_on(url: str, talk: Talk, segment: int, answers: Answers) -> int:
    """Read the continuation and ask the questions of a talk; tokens that came back from the host for it."""
    restored = 0
    if talk.continuation:
        said = _generate(url, [*talk.context, *talk.continuation], 1, return_hidden_states=True)
        states = torch.tensor(said["meta_info"]["hidden_states"][0])
        new = len(talk.context) - talk.whole(segment) + len(talk.continuation)
        if states.shape[0] != new:
            raise ServerLost(
                f"it returned hidden states of {states.shape[0]} tokens, not of the {new} behind the cache"
            )
        answers.states.append(states[-len(talk.continuation) :])
        restored += _from_host(said)
    answers.said.append([])
    for question in talk.questions:
        said = _generate(url, [*talk.context, *question.ids], ANSWER_TOKENS)
        answers.said[-1].append(said["output_ids"])
        restored += _from_host(said)
    return restored


def _from_host(said: dict[str, Any]) -> int:
    return (said["meta_info"].get("cached_tokens_details") or {}).get("host", 0)


def _generate(url: str, ids: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    body = {"input_ids": list(ids), "sampling_params": sampling, **more}
    try:
        return httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status().json()
    except httpx.HTTPError as error:
        raise ServerLost(f"{type(error).__name__} on /generate") from None

"""Conversations in the recall model's language, and a server's answers to questions about them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.recall.questions import Interview
from benchmarks.recall.task import EOS, TOKEN_ID

REQUESTS, TURNS = "requests", "turns"
MODES = (REQUESTS, TURNS)
"""Every question follows the conversation alone, or all questions and right answers before it."""


@dataclass(frozen=True)
class Answered:
    """One question and its answer.

    Attributes:
        conversation, turn: numbers from 1.
        right: whether the first token is the fact's value.
        prompt: tokens of the prompt.
        sent_before: tokens from the first on that the request before it held as well.
        cached: tokens that the server found in its cache.
    """

    conversation: int
    turn: int
    right: bool
    prompt: int
    sent_before: int
    cached: int


def prompts(talk: Interview, mode: str) -> list[list[int]]:
    """Build the prompt of each question, in order, as token ids."""
    alone = [talk.prompt(fact) for fact in talk.facts]
    if mode == REQUESTS:
        return alone
    made, past = [], list(talk.history)
    for prompt, fact in zip(alone, talk.facts, strict=True):
        past = past + prompt[len(talk.history) :]
        made.append(past)
        past = [*past, TOKEN_ID[fact.value], TOKEN_ID[EOS]]
    return made


def ask(
    client: ServerClient,
    talks: Sequence[Interview],
    mode: str,
    at_once: int,
    on_answer: Callable[[], object] = lambda: None,
) -> list[Answered]:
    """Ask every question greedily: those of a conversation in order, `at_once` conversations together.

    Raises:
        ServerLost: the server went away.
        PointFailed: the server refused a prompt.
    """
    stop = threading.Event()

    def run(number: int, talk: Interview) -> list[Answered]:
        try:
            return _ask_one(client, number, talk, mode, stop, on_answer)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(run, number, talk) for number, talk in enumerate(talks, start=1)]
        try:
            return [answered for one in running for answered in one.result()]
        finally:
            # After an error, or Ctrl-C: conversations end with their current question, and no other begins.
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)


def conversations_at_once(talks: Sequence[Interview], mode: str, pool_tokens: int, most: int, segment: int) -> int:
    """Count the conversations, at most `most`, that the pool holds together; more would evict each other.

    Args:
        pool_tokens: virtual tokens of the pool.
    """
    longest = max(len(prompts(talk, mode)[-1]) for talk in talks) + 1
    # Whole segments, and one more for what a question adds.
    each = (-(-longest // segment) + 1) * segment
    return max(1, min(most, len(talks), pool_tokens // each))


def _ask_one(
    client: ServerClient,
    number: int,
    talk: Interview,
    mode: str,
    stop: threading.Event,
    on_answer: Callable[[], object],
) -> list[Answered]:
    answered: list[Answered] = []
    before: list[int] = []
    if mode == REQUESTS and not stop.is_set():
        # So that every question finds the conversation in the cache.
        before = list(talk.history)
        _generate(client, before, number)
    for turn, (prompt, fact) in enumerate(zip(prompts(talk, mode), talk.facts, strict=True), start=1):
        if stop.is_set():
            break
        answer = _generate(client, prompt, number)
        right = list(answer["output_ids"])[:1] == [TOKEN_ID[fact.value]]
        cached = answer["meta_info"]["cached_tokens"]
        answered.append(Answered(number, turn, right, len(prompt), common_prefix(before, prompt), cached))
        before = prompt
        on_answer()
    return answered


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _generate(client: ServerClient, prompt: Sequence[int], number: int) -> dict:
    try:
        return client.generate(prompt, 1)
    except PointFailed as error:
        raise PointFailed(f"conversation {number}: {error}") from None

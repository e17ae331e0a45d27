"""Conversations in the recall model's language, and a server's answers to questions about them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.recall.questions import Interview
from benchmarks.recall.task import TOKEN_ID


@dataclass(frozen=True)
class Answered:
    """One question and its answer.

    Attributes:
        right: whether the first token is the fact's value.
        prompt: tokens of the prompt.
        cached: tokens that the server found in its cache.
    """

    right: bool
    prompt: int
    cached: int


def longest_prompt(talks: Sequence[Interview]) -> int:
    """Return the number of tokens of the longest prompt."""
    return max(len(talk.prompt(fact)) for talk in talks for fact in talk.facts)


def ask(
    client: ServerClient,
    talks: Sequence[Interview],
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
            return _ask_one(client, number, talk, stop, on_answer)
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


def conversations_at_once(talks: Sequence[Interview], pool_tokens: int, most: int, segment: int) -> int:
    """Count the conversations, at most `most`, that the pool holds together; more would evict each other.

    Args:
        pool_tokens: virtual tokens of the pool.
    """
    longest = longest_prompt(talks) + 1
    # Whole segments, and one more for what a question adds.
    each = (-(-longest // segment) + 1) * segment
    return max(1, min(most, len(talks), pool_tokens // each))


def _ask_one(
    client: ServerClient,
    number: int,
    talk: Interview,
    stop: threading.Event,
    on_answer: Callable[[], object],
) -> list[Answered]:
    answered: list[Answered] = []
    if stop.is_set():
        return answered
    # So that every question finds the conversation in the cache.
    _generate(client, talk.history, number)
    for fact in talk.facts:
        if stop.is_set():
            break
        prompt = talk.prompt(fact)
        answer = _generate(client, prompt, number)
        right = list(answer["output_ids"])[:1] == [TOKEN_ID[fact.value]]
        answered.append(Answered(right, len(prompt), answer["meta_info"]["cached_tokens"]))
        on_answer()
    return answered


def _generate(client: ServerClient, prompt: Sequence[int], number: int) -> dict:
    try:
        return client.generate(prompt, 1)
    except PointFailed as error:
        raise PointFailed(f"conversation {number}: {error}") from None

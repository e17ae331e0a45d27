"""Send the prompts of sessions to a server and score what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.prompts import Completion, TokenizedSession, common_prefix
from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question and its answer.

    Attributes:
        turn: of its session, from 1.
        prompt: tokens of the prompt.
        sent_before: how many of them, from the first on, the request before it in its session held as well.
        cached: how many of them the server found in its cache.
    """

    session: str
    task: str
    turn: int
    score: float
    prompt: int
    sent_before: int
    cached: int
    text: str


def ask(
    client: ServerClient,
    talks: Sequence[TokenizedSession],
    at_once: int,
    on_answer: Callable[[], object] = lambda: None,
) -> list[AnsweredQuestion]:
    """Every question of every session, greedily; the questions of a session in order, `at_once` sessions together.

    Raises:
        ServerLost: the server went away.
        PointFailed: it answers, but refused a prompt.
    """
    stop, tokenizing = threading.Event(), threading.Lock()

    def run(talk: TokenizedSession) -> list[AnsweredQuestion]:
        try:
            return _ask_session(client, talk, stop, tokenizing, on_answer)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(run, talk) for talk in talks]
        try:
            return [asked for session in running for asked in session.result()]
        finally:
            # After an error, or Ctrl-C: sessions that run end with their current question, and no other begins.
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)


def sessions_at_once(
    talks: Sequence[TokenizedSession], new_tokens: int, pool_tokens: int, running: int, segment: int
) -> int:
    """How many sessions the pool holds side by side, at most `running`; more would evict each other's contexts.

    Args:
        new_tokens: of the longest answer.
        pool_tokens: virtual tokens of the pool.
    """
    longest = max(talk.longest() for talk in talks) + new_tokens
    # Whole segments, and one more for what a question adds.
    each = (-(-longest // segment) + 1) * segment
    return max(1, min(running, len(talks), pool_tokens // each))


def _ask_session(
    client: ServerClient,
    talk: TokenizedSession,
    stop: threading.Event,
    tokenizing: threading.Lock,
    on_answer: Callable[[], object],
) -> list[AnsweredQuestion]:
    session = talk.session
    before: list[int] = []
    said: list[Completion] = []
    asked: list[AnsweredQuestion] = []
    if stop.is_set():
        return asked
    with tokenizing:
        primer = talk.primer()
    if primer:
        _generate(client, primer, 1, session.name)
        before = primer
    for turn, question in enumerate(session.questions):
        if stop.is_set():
            return asked
        # Tokenizers are not made for several threads.
        with tokenizing:
            prompt = talk.prompt(turn, said)
        answer = _generate(client, prompt, question.new_tokens, session.name)
        said.append(Completion(tuple(answer["output_ids"]), answer["text"]))
        asked.append(
            AnsweredQuestion(
                session=session.name,
                task=question.task,
                turn=turn + 1,
                score=float(question.score(answer["text"])),
                prompt=len(prompt),
                sent_before=common_prefix(before, prompt),
                cached=answer["meta_info"]["cached_tokens"],
                text=answer["text"],
            )
        )
        before = prompt
        on_answer()
    return asked


def _generate(client: ServerClient, prompt: list[int], new_tokens: int, session: str) -> dict[str, Any]:
    try:
        return client.generate(prompt, new_tokens)
    except PointFailed as error:
        raise PointFailed(f"session {session}: {error}") from None

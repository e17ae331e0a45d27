"""The requests of a storm: prompts that share prefixes, turns, clients that leave, requests that are aborted."""

from __future__ import annotations

import collections
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.storm.features import CONTEXT_TOKENS, SEGMENT

CLIENTS = 14
VOCABULARY = range(10, 300)
HANGS_S = 120
"""Seconds without an answer after which a request counts as lost for ever."""

TRUNK_TOKENS, LONGEST_TOKENS = 700, 1300


@dataclass(frozen=True)
class Survivor:
    """A request that was answered: its prompt, the tokens of the answer and their log-probabilities, if it asked."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    adapter: str | None
    greedy: bool
    cached: int
    retractions: int


@dataclass
class Collected:
    """What came back: kinds of ends and how often, survivors, and what must not happen."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    survivors: list[Survivor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Client:
    """`asks`: for log-probabilities; if not, it decodes greedily, in short answers."""

    def __init__(
        self,
        url: str,
        number: int,
        seed: int,
        trunks: Sequence[list[int]],
        adapters: Sequence[str],
        greedy: bool,
        asks: bool,
    ) -> None:
        self._url, self._adapters, self._always_greedy, self._asks = url, adapters, greedy, asks
        self._random = random.Random(f"{seed}-{number}")
        self._trunks = trunks
        self._conversations: list[tuple[list[int], str | None]] = []

    def _tokens(self, least: int, most: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=self._random.randint(least, most))

    def _prompt(self) -> tuple[list[int], str | None]:
        """A prompt and the name of its adapter."""
        dice = self._random
        adapter = dice.choice([None, *self._adapters])
        kind = dice.random()
        if kind < 0.03:
            return [], adapter
        if kind < 0.10:
            return self._tokens(1, 3), adapter
        if kind < 0.14:
            return self._tokens(CONTEXT_TOKENS, CONTEXT_TOKENS + 50), adapter
        if kind < 0.50 and self._conversations:
            before, adapter = self._conversations.pop(dice.randrange(len(self._conversations)))
            return before + self._tokens(1, 120), adapter
        shared = dice.choice(self._trunks)[: dice.randint(0, TRUNK_TOKENS)] if kind < 0.80 else []
        return shared + self._tokens(1, 300), adapter

    def send(self, collected: Collected, lock: threading.Lock) -> None:
        """One request to its end. Raises httpx.TransportError where the server is silent or gone."""
        dice = self._random
        prompt, adapter = self._prompt()
        if LONGEST_TOKENS < len(prompt) < CONTEXT_TOKENS:
            prompt = prompt[-LONGEST_TOKENS // 2 :]
        greedy = self._always_greedy or not self._asks or dice.random() < 0.5
        # Greedy decoding soon says the same over and over, and equal tokens tie.
        new = 1 if dice.random() < 0.15 else dice.randint(2, 24 if greedy and not self._always_greedy else 90)
        if dice.random() < 0.4:
            # Ends where a segment does, or one token behind: the last one that is answered is not in the cache.
            new = -len(prompt) % SEGMENT + dice.choice((1, 1, 2))
            greedy = self._always_greedy or not self._asks
        rid = uuid.UUID(int=dice.getrandbits(128)).hex
        body: dict[str, Any] = {
            "input_ids": prompt,
            "rid": rid,
            "sampling_params": {
                "temperature": 0.0 if greedy else 1.0,
                "max_new_tokens": new,
                "ignore_eos": dice.random() < 0.8,
            },
            "return_logprob": self._asks,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        if dice.random() < 0.3:
            body["priority"] = dice.randint(0, 9)
        ill = not 0 < len(prompt) < CONTEXT_TOKENS
        way = dice.random()
        if not ill and way < 0.12:
            self._send_and_leave(body)
            end, survivor = "left", None
        else:
            aborts = not ill and way < 0.22
            end, survivor = self._ask(body, ill, abort_after_s=dice.uniform(0, 1.5) if aborts else None)
        with lock:
            collected.ends[end] += 1
            if survivor is not None:
                collected.survivors.append(survivor)
        if survivor is not None:
            whole = [*survivor.prompt, *survivor.tokens]
            if len(whole) < LONGEST_TOKENS - 250:
                self._conversations.append((whole, adapter))

    def _send_and_leave(self, body: dict[str, Any]) -> None:
        """Hang up in the middle of the answer, or before it."""
        after = self._random.randint(0, 5)
        with httpx.stream("POST", f"{self._url}/generate", json=body | {"stream": True}, timeout=HANGS_S) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number >= after:
                    break

    def _ask(self, body: dict[str, Any], ill: bool, abort_after_s: float | None) -> tuple[str, Survivor | None]:
        if abort_after_s is not None:
            timer = threading.Timer(abort_after_s, self._abort, (body["rid"],))
            timer.start()
        try:
            response = httpx.post(f"{self._url}/generate", json=body, timeout=HANGS_S)
        finally:
            if abort_after_s is not None:
                timer.cancel()
        if response.status_code == 400 and ill:
            return "refused", None
        if response.status_code != 200:
            text = " ".join(response.text.split())[:200]
            # An abort of a request that waits is answered like this.
            if abort_after_s is not None and "abort" in text.lower():
                return "aborted", None
            return f"status {response.status_code}: {text}", None
        answer = response.json()
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return ("aborted" if abort_after_s is not None else f"aborted by nobody: {meta['finish_reason']}"), None
        given = meta["output_token_logprobs"] if self._asks else None
        return "answered", Survivor(
            prompt=tuple(body["input_ids"]),
            tokens=tuple(answer["output_ids"] if given is None else (entry[1] for entry in given)),
            logprobs=None if given is None else tuple(entry[0] for entry in given),
            adapter=body.get("lora_path"),
            greedy=body["sampling_params"]["temperature"] == 0,
            cached=meta["cached_tokens"],
            retractions=meta.get("num_retractions", 0),
        )

    def _abort(self, rid: str) -> None:
        try:
            httpx.post(f"{self._url}/abort_request", json={"rid": rid}, timeout=HANGS_S)
        except httpx.TransportError:
            return  # whoever asked for the answer sees it, too


EXPECTED_ENDS = ("answered", "left", "aborted", "refused")


def storm(
    url: str,
    *,
    requests: int,
    seconds: float,
    seed: int,
    adapters: Sequence[str],
    greedy: bool,
    asks: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> Collected:
    """Send random requests from CLIENTS clients until that many are done, or the time is over.

    Args:
        requests: at most. seconds: after these no request is sent any more; those that run are waited for.
        adapters: names that requests may ask for. greedy: no request samples.
        asks: whether requests ask for log-probabilities; if not, none samples either.
        advance: called after each request.
    """
    rng = random.Random(seed)
    trunks = [rng.choices(VOCABULARY, k=TRUNK_TOKENS) for _ in range(2)]
    collected, lock, todo = Collected(), threading.Lock(), iter(range(requests))
    deadline = time.monotonic() + seconds

    def work(client: _Client) -> None:
        while time.monotonic() < deadline and not collected.problems:
            with lock:
                if next(todo, None) is None:
                    return
            try:
                client.send(collected, lock)
            except httpx.TimeoutException:
                collected.problems.append(f"hang: a request had no answer within {HANGS_S} s")
            except httpx.TransportError as error:
                collected.problems.append(f"the server is gone: {type(error).__name__}")
            except (KeyError, TypeError, ValueError) as error:
                collected.problems.append(f"an answer that is none: {type(error).__name__} {error}")
            advance()

    clients = [_Client(url, number, seed, trunks, adapters, greedy, asks) for number in range(CLIENTS)]
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    strange = sorted(set(collected.ends) - set(EXPECTED_ENDS))
    collected.problems += [f"{collected.ends[end]} requests ended with {end}" for end in strange]
    return collected

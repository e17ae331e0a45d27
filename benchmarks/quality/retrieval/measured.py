"""What one server is asked, and what is kept of its answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.quality.head import compare
from benchmarks.quality.texts import Text

ROUNDS = 3
"""How often decoding is timed on each server, after the round that returns hidden states."""

TIMED = 64
"""Decode steps that are timed, at most."""

_COUNTERS = ("pivot_questions", "pivot_answers", "retrieved_rows")
_PREFIX, _ENDING = "sglang:ragged_", "_total"


@dataclass(frozen=True)
class Measured:
    """One server's figures.

    kl, delta_nll: nats, by text, means over the tokens of --decoded; against the token pool.
    agrees: share of these whose most likely token is the token pool's.
    questions, answers, rows: RetrievalCounts of these texts; tokens: decoded meanwhile.
    step_ms: of a decode step of all texts at once, ROUNDS times.
    """

    kl: list[float]
    delta_nll: list[float]
    agrees: list[float]
    questions: int
    answers: int
    rows: int
    tokens: int
    start_up: str
    step_ms: list[float] = field(default_factory=list)


def decoded_states(client: ServerClient, text: Text, prompt: int) -> torch.Tensor:
    """float32 [tokens behind the prompt, hidden size]: what enters the head when the text behind `prompt` is decoded.

    The first is that of the prompt's last token. Raises ServerLost and PointFailed.
    """
    wanted = text.ids[prompt:]
    answer = client.generate(text.ids[:prompt], len(wanted), ignore_eos=True, forced=wanted, return_hidden_states=True)
    if tuple(answer["output_ids"]) != wanted:
        raise PointFailed("the server did not decode what the text says")
    of_prompt, *later = answer["meta_info"]["hidden_states"]
    found = torch.tensor([of_prompt[-1], *later])
    if len(found) != len(wanted):
        raise PointFailed(f"the server returned hidden states of {len(found)} of {len(wanted)} tokens")
    return found


def step_times_ms(clients: Mapping[str, ServerClient], texts: Sequence[Text], prompt: int) -> dict[str, list[float]]:
    """Milliseconds of a decode step of all texts at once, of each server ROUNDS times, the servers in turns.

    What comes before the first decoded token is taken off: the same requests for one token, timed just before.
    """
    found: dict[str, list[float]] = {name: [] for name in clients}
    steps = min(len(texts[0].ids) - prompt - 1, TIMED)
    for _ in range(ROUNDS):
        for name, client in clients.items():
            first = _seconds(client, texts, prompt, 1)
            found[name].append(round((_seconds(client, texts, prompt, 1 + steps) - first) * 1e3 / steps, 3))
    return found


def _seconds(client: ServerClient, texts: Sequence[Text], prompt: int, count: int) -> float:
    """Until the first `count` tokens behind the prompts of all texts are decoded."""

    def decode(text: Text) -> None:
        client.generate(text.ids[:prompt], count, ignore_eos=True, forced=text.ids[prompt : prompt + count])

    start = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as threads:
        list(threads.map(decode, texts))
    return time.perf_counter() - start


def counts(metrics: str) -> dict[str, int]:
    """The counters of retrieval in an answer of /metrics; 0 where there is none."""
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(_PREFIX))
    found = dict.fromkeys(_COUNTERS, 0)
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX).removesuffix(_ENDING)
            if name in found and sample.name.endswith(_ENDING):
                found[name] += int(sample.value)
    return found


def states_of(client: ServerClient, texts: Sequence[Text], prompt: int) -> list[torch.Tensor]:
    """`decoded_states` of every text, all at once. Raises ServerLost and PointFailed."""
    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(lambda text: decoded_states(client, text, prompt), texts))


def measure(
    client: ServerClient,
    texts: Sequence[Text],
    prompt: int,
    head: torch.Tensor,
    reference: Sequence[torch.Tensor] | None,
) -> tuple[Measured, list[torch.Tensor]]:
    """Ask one server; and its hidden states, which are compared with `reference`, or with themselves without one.

    Raises ServerLost and PointFailed.
    """
    states = states_of(client, texts, prompt)
    # `compare` takes the states of a token and the one that follows it.
    found = [
        compare(head, want, have, torch.tensor(text.ids[prompt - 1 : -1])).means()
        for text, want, have in zip(texts, reference or states, states, strict=True)
    ]
    rows = {name: [round(one[name], 6) for one in found] for name in ("kl", "delta_nll", "agrees")}
    asked = counts(client.metrics())
    tokens = len(texts) * (len(texts[0].ids) - prompt)
    made: dict[str, Any] = rows | {name.split("_")[1]: count for name, count in asked.items()}
    return Measured(**made, tokens=tokens, start_up=client.start_up_line()), states

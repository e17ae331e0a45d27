"""What one server is asked, and what is kept of its answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.quality.head import compare
from benchmarks.quality.texts import Text

ROUNDS = 1
"""How often decoding is timed, beside the round that returns hidden states."""

_COUNTERS = ("pivot_questions", "pivot_answers", "retrieved_rows")
_PREFIX, _ENDING = "sglang:ragged_", "_total"


@dataclass(frozen=True)
class Measured:
    """One server's figures.

    kl, delta_nll: nats, by text, means over the tokens of `Results.settings["decoded"]`; against the token pool.
    agrees: share of these whose most likely token is the token pool's.
    step_ms: of a decode step of all texts at once, the faster of ROUNDS.
    questions, answers, rows: RetrievalCounts of everything that was asked; tokens: decoded meanwhile.
    """

    kl: list[float]
    delta_nll: list[float]
    agrees: list[float]
    step_ms: float
    questions: int
    answers: int
    rows: int
    tokens: int
    start_up: str


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


def step_time_ms(client: ServerClient, texts: Sequence[Text], prompt: int) -> float:
    """Milliseconds of a decode step of all texts at once, what comes before the first one among them."""

    def decode(text: Text) -> None:
        client.generate(text.ids[:prompt], len(text.ids) - prompt, ignore_eos=True, forced=text.ids[prompt:])

    times = []
    with ThreadPoolExecutor(len(texts)) as threads:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            list(threads.map(decode, texts))
            times.append((time.perf_counter() - start) * 1e3 / (len(texts[0].ids) - prompt))
    return min(times)


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
    rows: dict[str, list[float]] = {"kl": [], "delta_nll": [], "agrees": []}
    for text, want, have in zip(texts, reference or states, states, strict=True):
        # `compare` takes the states of a token and the one that follows it.
        found = compare(head, want, have, torch.tensor(text.ids[prompt - 1 : -1]))
        for name, values in (
            ("kl", found.kl),
            ("delta_nll", found.nll - found.reference_nll),
            ("agrees", found.agrees),
        ):
            rows[name].append(round(float(values.mean()), 6))
    step_ms = step_time_ms(client, texts, prompt)
    asked = counts(client.metrics())
    tokens = (1 + ROUNDS) * len(texts) * (len(texts[0].ids) - prompt)
    made: dict[str, Any] = rows | {name.split("_")[1]: count for name, count in asked.items()}
    return Measured(**made, step_ms=round(step_ms, 3), tokens=tokens, start_up=client.start_up_line()), states

"""What one server is asked, and what is kept of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.quality.facts import Interview
from benchmarks.quality.served import recall
from benchmarks.quality.texts import Text

PARTS = 8
"""Equal parts of a text that have figures of their own."""


@dataclass(frozen=True)
class Measured:
    """nll: for each text, the mean of each part's tokens, nats. right: for each interview, its questions in the order
    in which their facts stand in the context."""

    nll: list[list[float]]
    right: list[list[bool]]
    start_up: str


def text_nll(client: ServerClient, text: Text) -> list[float]:
    """Mean negative log-probability of the tokens in each part of a text. Raises ServerLost and PointFailed."""
    answer = client.generate(text.ids, 1, return_logprobs=True)
    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
    if len(found) != len(text.ids) - 1:
        raise PointFailed(f"the server returned log-probabilities of {len(found)} of {len(text.ids) - 1} tokens")
    return [round(-float(np.mean(part)), 6) for part in np.array_split(found, PARTS)]


def measure(
    client: ServerClient,
    texts: Sequence[Text],
    interviews: Sequence[Interview],
    tokenizer: Any,
    advance: Callable[[], None],
) -> Measured:
    """Ask one server. Raises ServerLost and PointFailed."""
    nll = []
    for text in texts:
        client.flush()
        nll.append(text_nll(client, text))
        advance()
    return Measured(nll, recall(client, tokenizer, interviews, advance), client.start_up_line())

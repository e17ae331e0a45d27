"""What a server makes of texts and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import torch

from benchmarks.harness.errors import ServerLost
from benchmarks.quality.facts import Interview, is_right
from benchmarks.quality.texts import Text

ANSWER_TOKENS = 6


def hidden_states(url: str, text: Text) -> torch.Tensor:
    """float32 [tokens, hidden size]: what enters the head at every token of the text, in one prefill.

    Raises:
        ServerLost: the server does not answer, or answers something else.
    """
    answer = _generate(url, list(text.ids), 1, return_hidden_states=True)
    states = torch.tensor(answer["meta_info"]["hidden_states"][0])
    if states.shape[0] != len(text.ids):
        raise ServerLost(f"it returned hidden states of {states.shape[0]} of {len(text.ids)} tokens")
    return states


def recall(url: str, tokenizer: Any, interviews: Sequence[Interview], advance: Callable[[], None]) -> list[list[bool]]:
    """For each interview, which of its questions were answered rightly. The context is sent alone first."""

    def answers(interview: Interview) -> list[bool]:
        _generate(url, list(interview.context), 1)
        found = []
        for question in interview.questions:
            said = _generate(url, [*interview.context, *question.suffix], ANSWER_TOKENS)
            found.append(is_right(question.answer, tokenizer.decode(said["output_ids"])))
            advance()
        return found

    return [answers(interview) for interview in interviews]


def _generate(url: str, ids: list[int], new_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    try:
        answer = httpx.post(
            f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling, **more}, timeout=600
        )
        return answer.raise_for_status().json()
    except httpx.HTTPError as error:
        raise ServerLost(f"{type(error).__name__} on /generate") from None

"""Requests to a server's native API, as token ids, or as text with pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.launch import Server
from sgl_ragged.mem_pool.open_cache import LEAST_TOKENS


@dataclass(frozen=True)
class Answer:
    """Generated tokens, their logprobs, the input logprobs that were asked for, and cached prompt tokens."""

    tokens: list[int]
    output_logprobs: np.ndarray
    input_logprobs: np.ndarray
    cached: int


def generate(server: Server, tokens: Sequence[int], new: int, *, logprobs_from: int | None = None) -> Answer:
    """Greedy decoding of exactly `new` tokens after these; `logprobs_from` as in `ask`."""
    return ask(server, {"input_ids": list(tokens)}, new, logprobs_from=logprobs_from)


def ask(server: Server, prompt: Mapping[str, Any], new: int, *, logprobs_from: int | None = None) -> Answer:
    """Greedy decoding of exactly `new` tokens.

    Args:
        prompt: what the native API calls `input_ids`, or `text` and `image_data`.
        logprobs_from: input position from which logprobs are returned (its own first one is undefined and left
            out). The radix cache serves no token after it. None: output logprobs only.
    """
    body = {
        **prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
    }
    if logprobs_from is not None:
        body["logprob_start_len"] = logprobs_from
    response = httpx.post(f"{server.url}/generate", json=body, timeout=600)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    given = meta.get("input_token_logprobs") or []
    return Answer(
        tokens=[entry[1] for entry in meta["output_token_logprobs"]],
        output_logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]]),
        input_logprobs=np.array([entry[0] for entry in given if entry[0] is not None]),
        cached=meta["cached_tokens"],
    )


def found_of(tokens: int, segment: int) -> int:
    """Tokens that are found of a prompt that begins with so many which have been computed before, those of its last
    open segment among them; a server never finds all of a prompt."""
    border, rest = divmod(tokens, segment)
    return tokens if rest >= (1 if border else LEAST_TOKENS) else border * segment


def generate_all(server: Server, prompts: Sequence[Sequence[int]], new: int, **options: int | None) -> list[Answer]:
    """`generate` for all prompts at once, in their order."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: generate(server, prompt, new, **options), prompts))


def flush(server: Server) -> None:
    """Empty the radix cache; raises when the server does not become idle: the last answer is out before its end."""
    httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=60).raise_for_status()


def server_settings(server: Server) -> dict[str, Any]:
    """What /server_info says under `ragged`."""
    return httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]


def wait_until(holds: Callable[[], bool]) -> None:
    """SGLang writes gauges once more when the last request has ended, soon after it was answered."""
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert holds()


def ragged_metrics(server: Server) -> dict[str, float]:
    """What /metrics says under sglang:ragged_, names without that prefix; one rank's server.

    Those that are counted per tier are named `name/tier`.
    """
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert any(sample.name == "sglang:num_running_reqs" for sample in samples), "no metrics at all"
    start = "sglang:ragged_"
    return {
        "/".join([sample.name.removeprefix(start), *([sample.labels["tier"]] if "tier" in sample.labels else [])]): (
            sample.value
        )
        for sample in samples
        if sample.name.startswith(start)
    }

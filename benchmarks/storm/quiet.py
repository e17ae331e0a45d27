"""What a quiet server answers to a request of the storm: alone, and with an empty cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from benchmarks.harness.errors import ServerLost
from benchmarks.storm.traffic import HANGS_S, Survivor

TOLERANCE = 1e-4
"""Largest difference of log-probabilities in float32 that rounding explains."""

CACHED_SHARES, BEHIND_TOKENS = (0.0, 0.5, 1.0), (1, 2, 4, 7, 11, 19, 30, 47, 90)
"""Of a prompt, and behind an answer: what makes batches of other shapes."""


class QuietServer:
    """Asks the server at `url`, one request at a time."""

    def __init__(self, url: str) -> None:
        self._url = url

    def difference(self, survivor: Survivor) -> float:
        """Largest difference between the survivor's log-probabilities and those that prefill gives its tokens.

        What stands at a position depends on the tokens before it alone, whether it was decoded or prefilled.
        """
        return float(self._differences(survivor).max())

    def begins(self, survivor: Survivor) -> int:
        """The first token of the answer with more than a difference of rounding."""
        return int(np.argmax(~(self._differences(survivor) <= TOLERANCE)))

    def nearest(self, survivor: Survivor) -> float:
        """The smallest difference among answers to the same request, which this server computes in several ways.

        Where two tokens tie at the edge of a budget, which one is kept is a matter of rounding, and so is which expert
        a token goes to: the shape of a batch decides. So a part of the prompt is asked for before, which then comes
        from the cache, other tokens follow behind the answer, and what the server decodes itself is looked at, too.
        """
        found = [self.decoded_difference(survivor)] if survivor.greedy else [np.inf]
        for share, behind in itertools.product(CACHED_SHARES, BEHIND_TOKENS):
            if min(found) <= TOLERANCE:
                break
            self._flush()
            if cut := int(len(survivor.prompt) * share):
                self._ask(survivor.prompt[:cut], survivor.adapter, 1)
            found.append(float(self._differences(survivor, flush=False, behind=behind).max()))
        return min(found)

    def decoded_difference(self, survivor: Survivor) -> float:
        """The same to what this server decodes by itself, up to where it takes another token; for greedy survivors."""
        self._flush()
        given = self._ask(survivor.prompt, survivor.adapter, len(survivor.tokens))["output_token_logprobs"]
        if survivor.logprobs is None:
            return 0.0 if survivor.tokens == tuple(entry[1] for entry in given) else np.inf
        largest = 0.0
        for token, logprob, (own, decoded, *_) in zip(survivor.tokens, survivor.logprobs, given, strict=False):
            largest = max(largest, abs(own - logprob))
            # Two tokens may be equally likely; behind them, the answers are answers to different things.
            if token != decoded:
                break
        return largest

    def _differences(self, survivor: Survivor, *, flush: bool = True, behind: int = 0) -> np.ndarray:
        """Of each token's log-probability; without one, to the best token's, which is what greedy answers take."""
        own, best = self._forced(survivor, flush=flush, behind=behind)
        return best - own if survivor.logprobs is None else np.abs(own - survivor.logprobs)

    def _forced(self, survivor: Survivor, *, flush: bool, behind: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the answer's tokens, and those of the likeliest ones in their places."""
        if flush:
            self._flush()
        whole = [*survivor.prompt, *survivor.tokens, *itertools.repeat(survivor.prompt[0], behind)]
        start = len(survivor.prompt) - 1
        meta = self._ask(whole, survivor.adapter, 1, logprob_start_len=start, top_logprobs_num=1)
        # The first one has nothing before it here.
        answer = slice(1, 1 + len(survivor.tokens))
        own = [entry[0] for entry in meta["input_token_logprobs"][answer]]
        return np.array(own), np.array([best[0][0] for best in meta["input_top_logprobs"][answer]])

    def _flush(self) -> None:
        self._post("/flush_cache?timeout=30", None)

    def _ask(self, tokens: Sequence[int], adapter: str | None, new: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, **more}
        if adapter is not None:
            body["lora_path"] = adapter
        return self._post("/generate", body).json()["meta_info"]

    def _post(self, path: str, body: Any) -> httpx.Response:
        try:
            response = httpx.post(self._url + path, json=body, timeout=HANGS_S)
        except httpx.TransportError as error:
            raise ServerLost(f"the quiet server: {type(error).__name__} on {path}") from None
        if response.status_code != 200:
            raise ServerLost(f"the quiet server answers {response.status_code} on {path}: {response.text[:200]}")
        return response

"""Ask a running SGLang server for tokens and distributions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.distributions import Distributions

LIKELIEST = 32
"""Tokens per position whose log-probabilities are asked for."""

PATIENCE_S = 600.0

Prompt = str | list[dict[str, Any]] | list[int]
"""Text, messages in OpenAI's format, or token ids."""


class RunningServer:
    """A server by its URL. Requests have cache namespaces of their own, so nothing is flushed and other traffic runs.

    Methods raise RaggedConfigError where the server cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def info(self) -> dict[str, Any]:
        """Return /server_info; an empty dictionary if the server has none."""
        try:
            answer = self._client.get("/server_info")
        except httpx.HTTPError as error:
            raise RaggedConfigError(f"no server answers at {self.url} ({type(error).__name__})") from error
        return answer.json() if answer.status_code == 200 else {}

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; messages go through the model's chat template."""
        if not isinstance(prompt, str) and all(isinstance(one, int) for one in prompt):
            return [one for one in prompt if isinstance(one, int)]
        body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        return [int(token) for token in self._post("/tokenize", body)["tokens"]]

    def read(self, ids: Sequence[int], start: int = 0, namespace: str | None = None) -> Distributions:
        """Return what the server predicts for the tokens of a prompt after position `start`.

        Tokens before `start` come from the cache where the namespace has them; a new namespace has nothing.
        """
        meta = self._generate(ids, 1, namespace, logprob_start_len=start)["meta_info"]
        own, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
        # The first entry is the token at `start`, which is not predicted.
        return Distributions.from_meta(start + 1, own[1:], top[1:])

    def go_on(self, ids: Sequence[int], count: int, namespace: str | None = None) -> tuple[list[int], Distributions]:
        """Return the next `count` tokens of greedy decoding and what was predicted for each."""
        answer = self._generate(ids, count, namespace, ignore_eos=True)
        meta = answer["meta_info"]
        own, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
        return list(answer["output_ids"]), Distributions.from_meta(len(ids), own, top)

    def _generate(
        self, ids: Sequence[int], count: int, namespace: str | None, ignore_eos: bool = False, **more: Any
    ) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": ignore_eos}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **more}
        return self._post(
            "/generate", body | {"top_logprobs_num": LIKELIEST, "extra_key": namespace or new_namespace()}
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise RaggedConfigError(f"{self.url}{path} did not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise RaggedConfigError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json()


def new_namespace() -> str:
    """Return a name under which a server has cached nothing."""
    return f"sgl-ragged-verify-{uuid.uuid4().hex}"

"""Ask a running SGLang server, or a prefill and a decode server, for tokens and distributions."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.prompts import Prompt
from sgl_ragged.verify.server import Server

PATIENCE_S = 600.0


class RunningServer(Server):
    """A server by its URL, or a router in front of several.

    Methods raise RaggedConfigError where the server cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def info(self) -> dict[str, Any]:
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

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._post("/generate", body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise RaggedConfigError(f"{self.url}{path} did not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise RaggedConfigError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json()


class ServersApart(RunningServer):
    """A prefill and a decode server, each asked as a router asks it.

    A router would not return the likeliest tokens of prompts: only the prefill server has them.
    """

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        super().__init__(prefill_url)
        self._decode = RunningServer(decode_url)
        port = self.info().get("disaggregation_bootstrap_port")
        self._bootstrap = {"bootstrap_host": urlsplit(self.url).hostname, "bootstrap_port": port}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        body = body | self._bootstrap | {"bootstrap_room": random.getrandbits(62)}
        threads = ThreadPoolExecutor(1)
        decoding = threads.submit(self._decode.generate, body)
        # If the prefill server refuses, the decode server is not waited for.
        threads.shutdown(wait=False)
        prefilled, decoded = super().generate(body)["meta_info"], decoding.result()
        names = ("input_token_logprobs", "input_top_logprobs")
        return decoded | {"meta_info": decoded["meta_info"] | {name: prefilled[name] for name in names}}

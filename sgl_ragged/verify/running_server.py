"""Ask a running SGLang server for tokens and distributions."""

from __future__ import annotations

from typing import Any

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

"""Requests to a running SGLang server, one at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.harness.errors import PointFailed, ServerLost

GENERATE_S, FLUSH_S, INFO_S, HEALTH_S = 1800, 30, 60, 30
"""Seconds until a request counts as lost; a long prompt on a few cores takes minutes."""

ATTEMPTS, RETRY_S = 20, 0.3
"""Of reading /metrics."""


class ServerClient:
    """A client of the server at `url`, for any number of threads."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Seconds, from which benchmarks take differences.
        self.clock: Callable[[], float] = time.perf_counter
        # A connection for each request: servers close idle ones, now and then just when they are used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, limits=limits)

    @property
    def pools(self) -> tuple[str, ...]:
        """Addresses of the servers that have the pools."""
        return (self.url,)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def generate(
        self,
        ids: Sequence[int],
        new_tokens: int,
        *,
        ignore_eos: bool = False,
        return_hidden_states: bool = False,
        return_logprobs: bool = False,
        forced: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The answer of /generate to a prompt of token ids, decoded greedily, `new_tokens` tokens at most.

        `return_logprobs`: of every token of the prompt, too. `forced`: what is decoded, whatever the model would say;
        the server needs --enable-custom-logit-processor and --disable-overlap-schedule.

        Raises:
            ServerLost: the server went away.
            PointFailed: it answers, but refused the prompt or broke off.
        """
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
        body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling}
        if forced:
            from benchmarks.harness.forced import Forced

            sampling["custom_params"] = {"tokens": list(forced)}
            body["custom_logit_processor"] = Forced.to_str()
        if return_hidden_states:
            body["return_hidden_states"] = True
        if return_logprobs:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        response = self._send("POST", "/generate", GENERATE_S, json=body)
        answer = response.json() if response.status_code == 200 else {}
        if (answer.get("meta_info", {}).get("finish_reason") or {}).get("type", "abort") == "abort":
            reason = " ".join(response.text.split())[:300]
            raise PointFailed(f"the server refused a prompt of {len(ids)} tokens: {reason}")
        return answer

    def flush(self) -> None:
        """Empty the radix cache. Raises ServerLost when the server is gone or does not come to rest."""
        # The last answer may arrive some milliseconds before the scheduler is idle.
        if self._send("POST", "/flush_cache", 2 * FLUSH_S, params={"timeout": FLUSH_S}).status_code != 200:
            raise ServerLost("its cache could not be emptied: something else keeps it busy")

    def is_healthy(self) -> bool:
        with contextlib.suppress(ServerLost):
            return self._send("GET", "/health", HEALTH_S).status_code == 200
        return False

    def check_alive(self) -> None:
        """Raises ServerLost when the server does not answer."""
        if not self.is_healthy():
            raise ServerLost("it is not healthy")

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the server takes, by its context length and its pool. Raises ServerLost."""
        return int(self._info()["max_req_input_len"])

    def pool_tokens(self) -> int:
        """Virtual tokens that the pool holds. Raises ServerLost."""
        return int(self._info()["max_total_num_tokens"])

    def ragged(self) -> dict[str, Any]:
        """What the server says of its ragged pool; empty on the token pool. Raises ServerLost."""
        return self._info().get("ragged", {})

    def metrics(self) -> str:
        """The answer of /metrics, which fails now and then while the server's processes write it. Raises ServerLost."""
        for _ in range(ATTEMPTS):
            answer = self._send("GET", "/metrics/", INFO_S)
            if answer.status_code == 200:
                return answer.text
            time.sleep(RETRY_S)
        raise ServerLost(f"/metrics answers {answer.status_code}")

    def start_up_line(self) -> str:
        """The plugin's start-up line; empty on the token pool. Raises ServerLost."""
        return self.ragged().get("summary", "")

    def _info(self) -> dict[str, Any]:
        response = self._send("GET", "/server_info", INFO_S)
        if response.status_code != 200:
            raise ServerLost(f"/server_info answers {response.status_code}")
        return response.json()

    def _send(self, method: str, path: str, timeout: float, **content: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, timeout=timeout, **content)
        except httpx.TransportError as error:
            raise ServerLost(f"{type(error).__name__} on {path}") from None


class RoutedClient(ServerClient):
    """A client of a router at `url`, and of the servers that it has behind it, of which the pools are."""

    def __init__(self, url: str, servers: Sequence[str]) -> None:
        super().__init__(url)
        self._servers = [ServerClient(server) for server in servers]

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.__exit__()
        super().__exit__()

    def flush(self) -> None:
        """The same of all servers."""
        for server in self._servers:
            server.flush()

    def check_alive(self) -> None:
        super().check_alive()
        for server in self._servers:
            server.check_alive()

    def longest_prompt(self) -> int:
        """The least of all servers."""
        return min(server.longest_prompt() for server in self._servers)

    def pool_tokens(self) -> int:
        """Of all servers together."""
        return sum(server.pool_tokens() for server in self._servers)

    def metrics(self) -> str:
        """Of the first server."""
        return self._servers[0].metrics()

    def _info(self) -> dict[str, Any]:
        return self._servers[0]._info()

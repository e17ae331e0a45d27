"""The pools under test, and where their servers come from: started here, or running already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.harness.errors import ServerLost, SettingsError
from benchmarks.harness.launch import Server, serve
from benchmarks.harness.warm_start import Nursery

DECODE_LOG_INTERVAL = 8
"""Decode steps between two updates of a server's gauges; SGLang's own 40 is coarse beside short answers."""


@dataclass(frozen=True)
class Pool:
    """SGLang's pool (`ratio` None), or the ragged one at a ratio."""

    ratio: float | None

    @property
    def name(self) -> str:
        return "token" if self.ratio is None else f"ragged@{self.ratio:g}"

    @classmethod
    def parse(cls, text: str) -> Pool:
        """'token' or 'ragged@0.3'. Raises SettingsError."""
        if text == "token":
            return cls(None)
        kind, _, ratio = text.partition("@")
        with contextlib.suppress(ValueError):
            if kind == "ragged" and 0 < float(ratio) <= 1:
                return cls(float(ratio))
        raise SettingsError(f"{text!r} is no pool: write token, or ragged@RATIO with a ratio in (0, 1]")


@dataclass(frozen=True)
class Target:
    """A server that takes requests. `server`: its process and log, None when it was not started here."""

    url: str
    server: Server | None

    def start_up_line(self) -> str:
        """The plugin's start-up line; empty on the token pool."""
        return self.ragged().get("summary", "")

    def ragged(self) -> dict[str, Any]:
        """What the server says of its ragged pool; empty on the token pool."""
        return self._info().get("ragged", {})

    def flush(self) -> None:
        """Empty the radix cache. Raises ServerLost when the server is gone or does not come to rest."""
        # The last stream may end some milliseconds before the scheduler is idle.
        if self._post("/flush_cache", timeout=30).status_code != 200:
            raise ServerLost("its cache could not be emptied: something else keeps it busy")

    def check_alive(self) -> None:
        """Raises ServerLost when the server does not answer."""
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{self.url}/health", timeout=30).status_code == 200:
                return
        raise ServerLost("it is not healthy")

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the server takes, by its context length and its pool."""
        return int(self._info()["max_req_input_len"])

    def pool_tokens(self) -> int:
        """Virtual tokens that the pool holds."""
        return int(self._info()["max_total_num_tokens"])

    def _info(self) -> dict[str, Any]:
        try:
            return httpx.get(f"{self.url}/server_info", timeout=60).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ServerLost(f"{type(error).__name__} on /server_info") from None

    def _post(self, path: str, *, timeout: float) -> httpx.Response:
        try:
            return httpx.post(f"{self.url}{path}", params={"timeout": timeout}, timeout=2 * timeout)
        except httpx.TransportError as error:
            raise ServerLost(f"{type(error).__name__} on {path}") from None


class Servers(Protocol):
    """Where the server of a pool comes from."""

    def target(self, pool: Pool, requests: int, log: Path) -> contextlib.AbstractContextManager[Target]:
        """A server with the pool, for up to `requests` running requests, for the length of a `with` block."""
        ...


def server_arguments(pool: Pool, requests: int, kv_bytes: str, *, on_cpu: bool) -> list[str]:
    """Command line of a server for up to `requests` running requests, less model and address."""
    args = ["--kv-bytes", kv_bytes, "--max-running-requests", str(requests), "--enable-cache-report"]
    args += ["--enable-metrics", "--decode-log-interval", str(DECODE_LOG_INTERVAL)]
    if on_cpu:
        args += ["--dtype", "float32"]
    if pool.ratio is not None:
        # Equal budgets unless further flags say otherwise: whose speed is measured need not be calibrated first.
        return [*args, "--kv-pool", "ragged", "--ragged-ratio", str(pool.ratio), "--ragged-profile", "uniform"]
    return [*args, "--kv-pool", "token", *(("--attention-backend", "torch_native") if on_cpu else ())]


class Started:
    """One fresh server for each point, all with the same flags but the pool's, and those that a caller adds."""

    def __init__(self, model: str, kv_bytes: str, common: Sequence[str], ragged: Sequence[str]) -> None:
        """`common`, `ragged`: further flags of all servers, and of the ragged ones."""
        self._model, self._kv_bytes, self._common, self._ragged = model, kv_bytes, common, ragged
        self._nursery: Nursery | None = None

    def __enter__(self) -> Started:
        import torch

        # On CPUs, servers are forks of one process that has imported SGLang: each is ready in seconds.
        if not torch.accelerator.is_available():
            self._nursery = Nursery().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._nursery is not None:
            self._nursery.__exit__()

    @contextlib.contextmanager
    def target(
        self, pool: Pool, requests: int, log: Path, added: Sequence[str] = (), ready_within_s: float = 300
    ) -> Iterator[Target]:
        """`added`: flags of this server alone."""
        start = self._nursery.serve if self._nursery else serve
        args = server_arguments(pool, requests, self._kv_bytes, on_cpu=self._nursery is not None)
        further = [*self._common, *(self._ragged if pool.ratio is not None else ()), *added]
        with start(self._model, *args, *further, log=log, ready_within_s=ready_within_s) as server:
            yield Target(server.url, server)


class Connected:
    """Servers that somebody else runs, one for each pool; their caches are emptied before each point."""

    def __init__(self, urls: dict[Pool, str]) -> None:
        self._urls = urls

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def target(self, pool: Pool, requests: int, log: Path) -> Iterator[Target]:
        yield Target(self._urls[pool].rstrip("/"), None)

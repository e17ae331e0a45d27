"""Gauges of servers, polled from /metrics: the size and use of their pools, and retractions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.errors import ServerLost, SettingsError

_CAPACITY = "sglang:max_total_num_tokens"
_BYTES = "sglang:kv_cache_memory_usage_gb"
_FREE = "sglang:kv_available_tokens"
_RETRACTED = "sglang:num_retracted_requests_total"
_ATTEMPTS, _RETRY_S = 10, 0.2
_WANTED = (_CAPACITY, _BYTES, _FREE, _RETRACTED)


@dataclass(frozen=True)
class PoolSize:
    """`tokens`: virtual tokens of the pool; `kv_bytes`: what it takes on one rank, tails included."""

    tokens: int
    kv_bytes: int


@dataclass(frozen=True)
class Sample:
    """`at_s`: seconds since the point began; `kv_bytes`: resident; `retracted`: requests since the point began."""

    at_s: float
    kv_bytes: int
    retracted: int


def read(text: str) -> dict[str, float]:
    """The wanted values of an answer of /metrics; a counter that never counted is absent there and 0 here.

    Raises:
        SettingsError: the server does not say what its pool holds.
    """
    # A server's answer has hundreds of histogram lines, and parsing them all takes time from the server.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_WANTED))
    values = {_RETRACTED: 0.0}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            values[sample.name] = sample.value
    missing = [name for name in _WANTED if name not in values]
    if missing:
        raise SettingsError(f"the server's /metrics lack {', '.join(missing)}: start it with --enable-metrics")
    return values


def pool_size(values: dict[str, float]) -> PoolSize:
    return PoolSize(int(values[_CAPACITY]), round(values[_BYTES] * 2**30))


def resident_bytes(values: dict[str, float]) -> int:
    """KV bytes that hold tokens of running requests or of the radix tree.

    The share of the pool that is not free, times its bytes. The tails of a ragged pool, allocated all the time, are
    thereby spread over its tokens: a full pool counts with all its bytes, an empty one with none.
    """
    size = pool_size(values)
    # Slots that SGLang keeps for padding are neither free nor used; it counts no token in them.
    used = max(0, size.tokens - int(values[_FREE]))
    return size.kv_bytes * used // size.tokens


class Poller:
    """Polls servers while a point runs, and adds up what they say."""

    def __init__(self, urls: Sequence[str], began: float, every_s: float) -> None:
        """`began`: time.perf_counter() at the beginning of the point."""
        self._clients = [httpx.AsyncClient(base_url=url, timeout=60) for url in urls]
        self._began, self._every_s = began, every_s
        self._retracted_before = 0
        self.samples: list[Sample] = []

    async def start(self) -> PoolSize:
        """The pool's size, and the state that samples count from. Raises ServerLost, SettingsError."""
        values = await self._read()
        self._retracted_before = int(values[_RETRACTED])
        # The cache is empty, but the gauges show so only after the next batch.
        self.samples = [Sample(0.0, 0, 0)]
        return pool_size(values)

    async def take(self) -> None:
        """Add one sample. Raises ServerLost, SettingsError."""
        values = await self._read()
        at_s = round(time.perf_counter() - self._began, 3)
        self.samples.append(Sample(at_s, resident_bytes(values), int(values[_RETRACTED]) - self._retracted_before))

    async def run(self) -> None:
        """Samples at a fixed interval until it is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.take()

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _read(self) -> dict[str, float]:
        every = [await self._read_one(client) for client in self._clients]
        return {name: sum(values[name] for values in every) for name in every[0]}

    async def _read_one(self, client: httpx.AsyncClient) -> dict[str, float]:
        # The server collects from files that its processes are writing: now and then it fails to, and answers 500.
        for _ in range(_ATTEMPTS):
            try:
                answer = await client.get("/metrics")
            except httpx.TransportError as error:
                raise ServerLost(f"{type(error).__name__} on /metrics") from None
            if answer.status_code == 404:
                raise SettingsError("the server has no /metrics: start it with --enable-metrics")
            if answer.status_code == 200:
                return read(answer.text)
            await asyncio.sleep(_RETRY_S)
        raise ServerLost(f"/metrics answers {answer.status_code}")

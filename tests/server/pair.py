"""A prefill and a decode server, and requests to both as a router sends them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.harness.launch import Server, free_port
from benchmarks.harness.server_pool import ServerPool
from tests.server.client import Answer

ENGINE = ("--disaggregation-transfer-backend", "nixl")


@dataclass(frozen=True)
class Pair:
    """port: of the prefill server's bootstrap."""

    prefill: Server
    decode: Server
    port: int
    _rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(
        self, tokens: Sequence[int], new: int, **more: Any
    ) -> tuple[Future[httpx.Response], Future[httpx.Response]]:
        """Responses to come, of the prefill and the decode server, to one request, greedy, of exactly `new` tokens.

        more: what its body has beside that.
        """
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
            **{"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(self._rooms)},
            **more,
        }
        threads = ThreadPoolExecutor(2)
        first, second = (
            threads.submit(httpx.post, f"{server.url}/generate", json=body, timeout=300)
            for server in (self.prefill, self.decode)
        )
        threads.shutdown(wait=False)
        return first, second

    def generate(self, tokens: Sequence[int], new: int, **more: Any) -> Answer:
        """As `client.generate`; what was cached is so on the prefill server."""
        said, answer = (asked.result() for asked in self.start(tokens, new, **more))
        assert said.status_code == 200, said.text
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        entries = meta["output_token_logprobs"]
        logprobs = np.array([entry[0] for entry in entries])
        return Answer([entry[1] for entry in entries], logprobs, np.array([]), meta["cached_tokens"])

    def generate_all(self, prompts: Sequence[Sequence[int]], new: int) -> list[Answer]:
        """`generate` for all prompts at once, in their order."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.generate(prompt, new), prompts))


@contextlib.contextmanager
def serve_prefill(servers: ServerPool, model: Path, *flags: str, port: int, **more: Any) -> Iterator[Server]:
    """more: as of `ServerPool.serve`, here and below."""
    role = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with servers.serve(model, *flags, *ENGINE, *role, **more) as server:
        yield server


@contextlib.contextmanager
def serve_decode(servers: ServerPool, model: Path, *flags: str, **more: Any) -> Iterator[Server]:
    with servers.serve(model, *flags, *ENGINE, "--disaggregation-mode", "decode", **more) as server:
        yield server


@contextlib.contextmanager
def serve_pair(
    servers: ServerPool,
    model: Path,
    *flags: str,
    folder: Path,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    **more: Any,
) -> Iterator[Pair]:
    """Both for the length of the `with` block. prefill, decode: flags of one of them alone."""
    port = free_port()
    with (
        serve_prefill(servers, model, *flags, *prefill, port=port, log=folder / "prefill.log", **more) as first,
        serve_decode(servers, model, *flags, *decode, log=folder / "decode.log", **more) as second,
    ):
        yield Pair(first, second, port)

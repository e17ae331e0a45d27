"""The pools under test, and where their servers come from: started here, or running already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.harness.client import RoutedClient, ServerClient
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.launch import LAUNCH_SERVER, serve
from benchmarks.harness.server_pool import ServerPool
from sgl_ragged.mem_pool.slab_format import WIDE

SLABS = "slab-dtype"
"""The option that says how finished segments are stored."""

DRAFT = "draft"
"""The option that says how many tokens a chain of drafts has, which is told SGLang."""

DECODE_LOG_INTERVAL = 8
"""Decode steps between two updates of a server's gauges; SGLang's own 40 is coarse beside short answers."""


@dataclass(frozen=True)
class Pool:
    """SGLang's pool (`ratio` None), or the ragged one at a ratio.

    `options`: further options of the ragged pool and their values, without `--ragged-`: ("scorer", "gate"). Slabs are
    wide unless one says otherwise, so that a name stays one configuration. ("draft", "4"): chains of four tokens, which
    SGLang's pool can have, too; there they are trees of as many tokens, if n-grams have branches.
    """

    ratio: float | None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        # Of a file its name alone: results must not depend on where it lies.
        shown = [f"{name}={Path(value).name.removesuffix('.safetensors')}" for name, value in self.options]
        return "+".join(["token" if self.ratio is None else f"ragged@{self.ratio:g}", *shown])

    @property
    def drafts(self) -> int | None:
        """Tokens of a chain; None without drafts."""
        return next((int(value) for name, value in reversed(self.options) if name == DRAFT), None)

    @property
    def flags(self) -> list[str]:
        """The command-line flags of `options`."""
        own = [part for name, value in self.options if name != DRAFT for part in (f"--ragged-{name}", value)]
        if self.drafts:
            own += ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]
            own += ["--speculative-num-draft-tokens", str(self.drafts)]
        return own

    @classmethod
    def parse(cls, text: str) -> Pool:
        """'token', 'ragged@0.3', 'ragged@0.3+scorer=keydiff+segment=128', or 'token+draft=4'. Raises SettingsError."""
        written, *options = text.split("+")
        kind, _, ratio = written.partition("@")
        with contextlib.suppress(ValueError):
            pairs = [(name, value) for name, _, value in (option.partition("=") for option in options)]
            whole = all(name and (int(value) > 1 if name == DRAFT else value) for name, value in pairs)
            if written == "token" and whole and all(name == DRAFT for name, _ in pairs):
                return cls(None, tuple(pairs))
            if kind == "ragged" and 0 < float(ratio) <= 1 and whole:
                return cls(float(ratio), tuple(pairs))
        raise SettingsError(
            f"{text!r} is no pool: write token, or ragged@RATIO with a ratio in (0, 1], and options of the ragged pool "
            f"behind it, as in ragged@0.3+scorer=keydiff; draft=N, with N of at least 2, goes with both"
        )


class Servers(Protocol):
    """Where the server of a pool comes from."""

    def client(self, pool: Pool, requests: int, log: Path) -> contextlib.AbstractContextManager[ServerClient]:
        """Of a server with the pool, for up to `requests` running requests, for the length of a `with` block."""
        ...


def server_arguments(pool: Pool, requests: int, kv_bytes: str, *, on_cpu: bool) -> list[str]:
    """Command line of a server for up to `requests` running requests, less model and address."""
    args = ["--kv-bytes", kv_bytes, "--max-running-requests", str(requests), "--enable-cache-report"]
    args += ["--enable-metrics", "--decode-log-interval", str(DECODE_LOG_INTERVAL)]
    if on_cpu:
        args += ["--dtype", "float32"]
        if pool.drafts:
            # SGLang overlaps no batches with drafts there, and each answer costs a step more where they overlap.
            args.append("--disable-overlap-schedule")
    if pool.ratio is not None:
        # Equal budgets unless further flags say otherwise: a server whose speed is measured needs no calibration.
        ragged = ["--kv-pool", "ragged", "--ragged-ratio", str(pool.ratio), "--ragged-profile", "uniform"]
        ragged += [] if any(name == SLABS for name, _ in pool.options) else [f"--ragged-{SLABS}", WIDE.name]
        return [*args, *ragged, *pool.flags]
    return [*args, "--kv-pool", "token", *(("--attention-backend", "torch_native") if on_cpu else ()), *pool.flags]


class Started:
    """One fresh server for each point, all with the same flags but the pool's, and those that a caller adds."""

    def __init__(self, model: str, kv_bytes: str, common: Sequence[str], ragged: Sequence[str]) -> None:
        """`common`, `ragged`: further flags of all servers, and of the ragged ones."""
        self._model, self._kv_bytes, self._common, self._ragged = model, kv_bytes, common, ragged
        self._servers: ServerPool | None = None

    def __enter__(self) -> Started:
        import torch

        # On CPUs, servers are forks of one process that has imported SGLang: each is ready in seconds.
        if not torch.accelerator.is_available():
            self._servers = ServerPool().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._servers is not None:
            self._servers.__exit__()

    @contextlib.contextmanager
    def client(
        self,
        pool: Pool,
        requests: int,
        log: Path,
        added: Sequence[str] = (),
        ready_within_s: float = 300,
        launcher: Sequence[str] = LAUNCH_SERVER,
    ) -> Iterator[ServerClient]:
        """`added`: flags of this server alone; `launcher`: what starts it."""
        start = self._servers.serve if self._servers else serve
        args = server_arguments(pool, requests, self._kv_bytes, on_cpu=self._servers is not None)
        further = [*self._common, *(self._ragged if pool.ratio is not None else ()), *added]
        with (
            start(self._model, *args, *further, log=log, launcher=launcher, ready_within_s=ready_within_s) as server,
            ServerClient(server.url) as client,
        ):
            yield client


class Connected:
    """Servers that somebody else runs, one for each pool; their caches are emptied before each point.

    Args:
        urls: the server's address, or that of a router and, behind it, those of its servers.
    """

    def __init__(self, urls: dict[Pool, Sequence[str]]) -> None:
        self._urls = urls

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def client(self, pool: Pool, requests: int, log: Path) -> Iterator[ServerClient]:
        url, *servers = self._urls[pool]
        with RoutedClient(url, servers) if servers else ServerClient(url) as client:
            yield client

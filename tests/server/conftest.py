"""One process that servers are forked from, ready in seconds; one server for all tests of client programs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.launch import Server
from benchmarks.harness.server_pool import ServerPool
from tests.character_model import make_character_model

DEFAULTS = {"--ragged-profile": "uniform", "--ragged-slab-dtype": "wide"}
"""Calibration takes minutes, and wide slabs are compared to 1e-4."""


class QuietServerPool(ServerPool):
    """A pool of servers that sleep while nobody asks. DEFAULTS hold unless a test gives other flags.

    They decode in torch, since numba compiles for seconds.
    """

    def serve(self, model: str | Path, *args: str, **more: object) -> contextlib.AbstractContextManager[Server]:
        return super().serve(model, *_completed(args, DEFAULTS), "--sleep-on-idle", **more)

    def start(self, model: str | Path, *args: str, **more: object) -> contextlib.AbstractContextManager[Server]:
        return super().start(model, *_completed(args, {"--ragged-kernel": "torch"}), **more)


def _completed(args: tuple[str, ...], defaults: dict[str, str]) -> list[str]:
    """Return a server's flags with those of the ragged pool that are not given."""
    missing = {flag: value for flag, value in defaults.items() if "ragged" in args and flag not in args}
    return [*args, *itertools.chain(*missing.items())]


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    with QuietServerPool() as servers:
        yield servers


@pytest.fixture(scope="session")
def character_model(tmp_path_factory):
    """Its answers are random, but it can spell any JSON; no test changes the folder."""
    return make_character_model(tmp_path_factory.mktemp("character") / "model")


@pytest.fixture(scope="session")
def character_server(character_model, servers) -> Iterator[Server]:
    """A ragged server at ratio 0.5 with segments of 64 tokens, for tests of what clients see."""
    flags = [
        *("--dtype", "float32", "--kv-pool", "ragged", "--ragged-ratio", "0.5", "--ragged-segment", "64"),
        *("--kv-bytes", "32MiB", "--max-running-requests", "8", "--enable-cache-report"),
        # A random model would fill its answer with spaces that JSON allows.
        *("--tool-call-parser", "glm45", "--constrained-json-disable-any-whitespace"),
    ]
    with servers.serve(character_model, *flags, log=character_model.parent / "server.log") as server:
        yield server

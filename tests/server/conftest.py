"""One process that servers are forked from, ready in seconds; one server for all tests of client programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.launch import Server
from benchmarks.harness.server_pool import ServerPool
from tests.character_model import make_character_model

DEFAULTS = {"--ragged-profile": "uniform", "--ragged-slab-dtype": "wide", "--ragged-kernel": "torch"}
"""Calibration takes minutes, wide slabs are compared to 1e-4, and numba compiles for seconds."""


class QuietServerPool(ServerPool):
    """Its servers leave the cores to others while nobody asks, and have DEFAULTS unless a test says otherwise."""

    def serve(self, model: str | Path, *args: str, **more: object) -> contextlib.AbstractContextManager[Server]:
        if "ragged" in args:
            for flag, value in DEFAULTS.items():
                args = args if flag in args else (*args, flag, value)
        return super().serve(model, *args, "--sleep-on-idle", **more)


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

"""What the launcher refuses before it calibrates or loads anything, in one line."""

from __future__ import annotations

import os
import socket

import pytest

from tests.launch.test_plugin import refusal, resolved
from tests.models import make_llama

RAGGED = ("--kv-pool", "ragged")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_more_bytes_than_memory(llama):
    said = refusal(llama, *RAGGED, "--kv-bytes", "4000000GiB")
    assert "--kv-bytes" in said
    assert "are free on this machine" in said


def test_too_few_bytes_for_one_request(llama):
    said = refusal(llama, *RAGGED, "--kv-bytes", "100KiB")
    assert "a KV budget of 102400 bytes is too small" in said


def test_a_port_that_is_in_use(llama):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in refusal(llama, *RAGGED, "--port", str(port))


def test_ranks_without_cores(llama, monkeypatch):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 4:
        assert "each rank needs a core of its own" in refusal(llama, *RAGGED, "--tp", "4")
    half = len(cores) // 2
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", str(cores[0]))
    said = refusal(llama, *RAGGED, "--tp", "2")
    value = said.split("SGLANG_CPU_OMP_THREADS_BIND='")[1].rstrip("'")
    assert value == "|".join(",".join(map(str, part)) for part in (cores[:half], cores[half : 2 * half]))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", value)
    resolved(llama, *RAGGED, "--tp", "2")

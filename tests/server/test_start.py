"""What a real server makes of limits, and how it ends where only a worker can tell that they cannot be kept."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from benchmarks.harness.errors import ServerFailed
from tests.models import make_llama
from tests.server.client import generate

pytestmark = pytest.mark.server

COMMON = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-pool", "ragged")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_max_total_tokens_limits_the_requests_too(llama, servers, tmp_path):
    """Without --kv-bytes: free memory would hold thousands of requests."""
    with servers.serve(llama, *COMMON, "--max-total-tokens", "8192", log=tmp_path / "log") as server:
        ragged = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
        assert ragged["virtual_tokens"] == 8192
        assert 1 <= ragged["max_requests"] < 32
        assert len(generate(server, range(3, 300), 3).tokens) == 3
        # Each rank logs the digest of what the launcher has read.
        assert f"digest of the plan {ragged['plan_digest']}" in server.log_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-bytes", "1MiB"), "a KV budget of 1048576 bytes is too small"),
        (("--kv-bytes", "32MiB", "--enable-hierarchical-cache", "--hicache-size", "100000"), "the host tier needs"),
    ],
    ids=["device", "host"],
)
def test_a_worker_that_cannot_serve_says_so_in_one_line(llama, servers, tmp_path, flags, words):
    with (
        pytest.raises(ServerFailed, match="server ended") as failed,
        servers.serve(llama, *COMMON, *flags, log=tmp_path / "log"),
    ):
        pass
    text = str(failed.value)
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("sgl_ragged: ")]
    assert len(lines) == 1
    assert words in lines[0]


def test_a_pool_that_holds_less_than_an_uncompressed_one_warns(llama, servers, tmp_path):
    """By more than a page: what its scorer keeps beside each request is not made up for."""
    flags = ("--kv-bytes", "32MiB", "--max-running-requests", "64", "--ragged-segment", "32")
    flags += ("--ragged-ratio", "1", "--ragged-scorer", "snapkv")
    with servers.serve(llama, *COMMON, *flags, log=tmp_path / "log") as server:
        ragged = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
        warnings = [line for line in server.log_text().splitlines() if "an uncompressed cache would hold" in line]
    assert len(warnings) == 1
    assert f"holds {ragged['virtual_tokens']} tokens" in warnings[0]
    assert "at ratio 1 nothing is compressed; lower --ragged-ratio" in warnings[0]


def test_command_line_ends_with_one_line_and_a_status(request, llama, servers):
    """SGLang's launcher: refused before anything starts, without a traceback."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(llama), "--device", "cpu"]
    command += ["--kv-pool", "ragged", "--page-size", "1"]
    if request.config.getoption("thorough"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    else:
        done = servers.run(command, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("sgl_ragged: --page-size 1 differs")
    assert "Traceback" not in done.stderr


def test_a_filter_of_plugins_that_leaves_this_one_out(llama, servers):
    """SGLang then does not know the flags; docs/operate.md has its words."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(llama), "--kv-pool", "ragged"]
    done = servers.run(command, timeout=120, env={"SGLANG_PLUGINS": "another"})
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("error: unrecognized arguments: --kv-pool ragged")

"""The multi-turn benchmark on both pools; a server that is killed stops it, and it goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.launch import Server
from benchmarks.harness.pools import Pool, server_arguments
from benchmarks.harness.results import Results
from benchmarks.multi_turn.measures import figures, rounds
from benchmarks.multi_turn.point import points
from benchmarks.recall import MODEL

pytestmark = pytest.mark.server

KV_BYTES, CLIENTS, ROUNDS = "24MiB", 3, 3
TRAFFIC = [
    *("--clients", str(CLIENTS), "--rounds", str(ROUNDS), "--request-length", "150", "--output-length", "6"),
    *("--kv-bytes", KV_BYTES, "--repeats", "1", "--poll-every", "0.2", "--json"),
]
BENCHMARK = (sys.executable, "-m", "benchmarks", "multi_turn", *TRAFFIC)


@contextlib.contextmanager
def server(servers, name: str, log: Path) -> Iterator[Server]:
    """A server with the flags that the benchmark would give it."""
    flags = server_arguments(Pool.parse(name), CLIENTS, KV_BYTES, on_cpu=True)
    with servers.serve(MODEL, *flags, log=log) as running:
        yield running


def test_both_pools_are_measured_and_a_killed_server_costs_its_point_only(servers, tmp_path):
    path = tmp_path / "out.json"
    with contextlib.ExitStack() as stack:
        token = stack.enter_context(server(servers, "token", tmp_path / "token.log"))
        ragged = stack.enter_context(server(servers, "ragged@0.5", tmp_path / "ragged.log"))
        urls = ["--output", str(path), "--request-rate", "3", "--min-load", "0"]
        command = [*BENCHMARK, *urls, "--url", f"token={token.url}", "--url", f"ragged@0.5={ragged.url}"]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            # The first of them are the warm-up's, one for each client.
            wait_for(lambda: ragged.log_text().count("/v1/chat/completions") > CLIENTS + 1, first)
            os.kill(ragged.process.pid, signal.SIGKILL)
            _, said = first.communicate(timeout=60)
        finally:
            first.kill()
        assert first.returncode == 1
        last = said.strip().splitlines()[-1]
        assert last.startswith("multi_turn: the server of ragged@0.5, 3 clients, run 1 is gone")
        assert "1 of 2 points are finished" in last
        assert "Traceback" not in said
        kept = points(Results.load(path, "multi_turn"))
        assert [point.key.pool for point in kept] == ["token"]

        again = stack.enter_context(server(servers, "ragged@0.5", tmp_path / "again.log"))
        served = token.log_text().count("/v1/chat/completions")
        command = [*BENCHMARK, *urls, "--url", f"token={token.url}", "--url", f"ragged@0.5={again.url}"]
        second = servers.run(command, timeout=90)
        assert second.returncode == 0, second.stderr
        assert token.log_text().count("/v1/chat/completions") == served

    measured = points(Results.load(path, "multi_turn"))
    assert measured[0] == kept[0]
    assert [point.rejected for point in measured] == [None, None]
    for point in measured:
        check_point(point)
    assert [point.key.pool for point in measured] == ["token", "ragged@0.5"]
    assert json.loads(second.stdout) == json.loads(path.read_text())


def check_point(point) -> None:
    """What holds of any measured point of this traffic."""
    total = figures(point.answers, point.samples)
    assert total.requests == CLIENTS * ROUNDS
    assert total.output_tokens == 6 * CLIENTS * ROUNDS
    assert total.recall == 1
    by_round = rounds(point)
    for answer in point.answers:
        assert 0 < answer.ttft_s <= answer.latency_s
        assert len(answer.itl_ms) <= 5
        assert answer.cached <= answer.prompt
    if point.key.pool == "token":
        # Everything fits: all that was there before is found again, to the token.
        assert by_round[2].hit_rate > 0.95
    else:
        assert by_round[2].cached_share > 0
    assert 0 < max(sample.kv_bytes for sample in point.samples) <= point.kv_bytes


@pytest.mark.thorough
def test_the_benchmark_starts_servers_itself_and_leaves_none(tmp_path):
    command = [*BENCHMARK, "--shape", "documents", "--shared-length", "300"]
    command += [
        "--pools",
        "ragged@0.3",
        "--request-rate",
        "inf",
        "--min-load",
        "0",
        "--output",
        str(tmp_path / "out.json"),
    ]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    family: dict[int, psutil.Process] = {}
    try:
        while run.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= {child.pid: child for child in psutil.Process(run.pid).children(recursive=True)}
            time.sleep(0.2)
        assert run.returncode == 0
    finally:
        run.kill()
        left = [child for child in family.values() if child.is_running()]
        for child in left:
            child.kill()
    assert len(family) >= 3
    assert not left
    (point,) = points(Results.load(tmp_path / "out.json", "multi_turn"))
    assert point.start_up.startswith("ragged KV pool: ")
    assert "ratio 0.3, " in point.start_up
    assert rounds(point)[2].cached_share > 0.5


def test_a_server_that_does_not_say_enough_is_one_line(servers, tmp_path):
    flags = ["--dtype", "float32", "--kv-bytes", KV_BYTES, "--max-running-requests", "3", "--kv-pool", "ragged"]
    with servers.serve(MODEL, *flags, log=tmp_path / "plain.log") as plain:
        address = ["--url", f"ragged@0.5={plain.url}", "--output", str(tmp_path / "out.json")]
        run = servers.run([*BENCHMARK, *address], timeout=60)
    assert run.returncode == 1
    assert "--enable-metrics" in run.stderr.strip().splitlines()[-1]


def wait_for(condition, process: subprocess.Popen) -> None:
    """Until it holds; fails when the process ends first."""
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.1)

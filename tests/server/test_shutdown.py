"""SIGTERM to a server under load: it answers what it has taken, ends, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from benchmarks.recall import MODEL
from benchmarks.storm.one_storm import HARMLESS
from tests.server.client import generate, wait_until

pytestmark = pytest.mark.server

BOUND_S = 120
"""SGLang looks every five seconds whether it is done; the rest is for slow machines."""

RAGGED = ("--kv-pool", "ragged", "--ragged-segment", "64")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(RAGGED, id="ragged"),
        pytest.param(("--kv-pool", "token"), id="token", marks=pytest.mark.thorough),
        pytest.param((*RAGGED, "--enable-hierarchical-cache", "--hicache-size", "1"), id="tier", marks=[
            pytest.mark.thorough,
        ]),
    ],
)  # fmt: skip
def test_a_server_under_load_ends(tmp_path, servers, flags):
    """Some requests run and some wait when the signal comes."""
    requests, new = 8, 150
    common = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
    with servers.serve(MODEL, *common, *flags, log=tmp_path / "log") as server:
        launcher = psutil.Process(server.process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        assert len(family) >= 3
        taken = threading.Semaphore(0)

        def ask(number: int) -> int:
            taken.release()
            return len(generate(server, range(10, 110 + number), new).tokens)

        with ThreadPoolExecutor(requests) as threads:
            answers = [threads.submit(ask, number) for number in range(requests)]
            for _ in answers:
                taken.acquire()
            wait_until(lambda: "Decode batch" in server.log_text() or "Prefill batch" in server.log_text())
            os.kill(launcher.pid, signal.SIGTERM)
            assert [answer.result() for answer in answers] == [new] * requests
        alive = psutil.wait_procs(family, timeout=BOUND_S)[1]
        assert alive == []
        # Of SGLang's own warm-up, which finds nobody to ask where a server ends early.
        assert "Traceback" not in HARMLESS.sub("", server.log_text())

"""Start a real SGLang server as a child process, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import ServerFailed


@dataclass(frozen=True)
class Server:
    """A running server: its address, process and log file."""

    url: str
    process: subprocess.Popen | psutil.Process
    log: Path

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago.

    Systems give connections ports from 32768 up (Linux) or 49152 up: below these, none of a neighbour's connections
    takes the port in the seconds until the server listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


WAITING_THREADS = {"GOMP_SPINCOUNT": "10000"}
"""On few cores, threads that spin for milliseconds while they wait take the time from those that work; threads that
sleep at once make a decode step of many small operations twice as long (benchmarks/multi_turn/README.md)."""

LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).parent / "sglang"), "serve")
"""SGLang's two command lines for one and the same server."""


@contextlib.contextmanager
def serve(
    model: str | Path,
    *args: str,
    log: Path,
    launcher: Sequence[str] = LAUNCH_SERVER,
    env: dict[str, str] | None = None,
    ready_within_s: float = 300,
) -> Iterator[Server]:
    """Run a server for the length of the `with` block; it and all its children are gone afterwards.

    Args:
        model: model path.
        args: further command-line arguments of the server.
        log: file for its output.
        launcher: LAUNCH_SERVER or SGLANG_SERVE.
        env: environment variables on top of this process's.

    Raises:
        ServerFailed: it ended early or was not healthy within `ready_within_s` seconds.
    """
    port = free_port()
    fixed = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launcher, *fixed, *args],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=WAITING_THREADS | os.environ | (env or {}),
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        wait_until_healthy(server, ready_within_s)
        yield server
    finally:
        stop(process)


def wait_until_healthy(server: Server, within_s: float) -> None:
    """Return once the server answers; raises ServerFailed if it ends or takes longer."""
    deadline = time.monotonic() + within_s
    with ServerClient(server.url) as client:
        while time.monotonic() < deadline:
            if _ended(server.process):
                raise ServerFailed(f"server ended:\n{server.log_text()[-4000:]}")
            if client.is_healthy():
                return
            time.sleep(0.1)
    raise ServerFailed(f"server not healthy within {within_s} s:\n{server.log_text()[-4000:]}")


def _ended(process: subprocess.Popen | psutil.Process) -> bool:
    return process.poll() is not None if isinstance(process, subprocess.Popen) else not process.is_running()


def stop(process: subprocess.Popen | psutil.Process) -> None:
    """End the server and every process that it started, and wait until they are gone.

    All of them at once and without a grace period: SGLang takes the end of a single worker for a crash and
    spends seconds on a post-mortem, and a benchmark's server has nothing to save.
    """
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        parent.suspend()
        family = [parent, *parent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=30)
    psutil.wait_procs(family, timeout=30)

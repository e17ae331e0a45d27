"""SGLang's router in front of servers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.harness.launch import Server, free_port, stop, wait_until_healthy


@contextlib.contextmanager
def route(*args: str, servers: int, log: Path, ready_within_s: float = 120) -> Iterator[Server]:
    """Run it for the length of the `with` block. args: which servers, how many, and how it chooses among them."""
    port = free_port()
    fixed = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    fixed += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *fixed, *args],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        wait_until_healthy(server, ready_within_s)
        # It is healthy before it knows of any server.
        deadline = time.monotonic() + ready_within_s
        while healthy(server) < servers:
            assert time.monotonic() < deadline, server.log_text()[-4000:]
            time.sleep(0.2)
        yield server
    finally:
        stop(process)


def healthy(router: Server) -> int:
    """Servers that it knows and takes for healthy."""
    return sum(one["is_healthy"] for one in httpx.get(f"{router.url}/workers", timeout=60).json()["workers"])

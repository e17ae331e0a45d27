"""Start many SGLang servers one after the other, each in seconds: forks of a process that has imported SGLang.

A server spends most of its start on imports, three processes times thousands of files. The nursery process imports
once; a server is then SGLang's own `run_server` in a fork of it, and its workers are forks in turn instead of fresh
interpreters. On CPUs only: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.launch import WAITING_THREADS, Server, free_port, stop, wait_until_healthy


class Nursery:
    """Context manager around the process that servers are forked from."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.warm_start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=WAITING_THREADS | os.environ,
        )
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)

    @contextlib.contextmanager
    def serve(self, model: str | Path, *args: str, log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
        """Like `benchmarks.launch.serve`."""
        port = free_port()
        fixed = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"args": [*fixed, *args], "log": str(log), "env": env or {}}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that servers are forked from has ended")
        server = Server(url=f"http://127.0.0.1:{port}", process=psutil.Process(int(answer)), log=log)
        try:
            wait_until_healthy(server, 120)
            yield server
        finally:
            stop(server.process)


def _main() -> None:
    """Fork a server for every line of standard input; answer with its process id."""
    import multiprocessing
    import signal

    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for spawn, which would import everything again.
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    nursery, servers = os.getpid(), []
    try:
        for line in sys.stdin:
            order = json.loads(line)
            pid = os.fork()
            if pid:
                servers.append(psutil.Process(pid))
                print(pid, flush=True)
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            output = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.environ.update(order["env"])
            load_plugins()
            sglang.launch_server.run_server(prepare_server_args(order["args"]))
            return
    finally:
        # Whoever asked for the servers may be gone without having stopped them.
        if os.getpid() == nursery:
            for server in servers:
                if server.is_running():
                    stop(server)


if __name__ == "__main__":
    _main()

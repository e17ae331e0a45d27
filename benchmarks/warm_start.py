"""Start many SGLang servers, and programs that import it, each in seconds: forks of a process that has imported it.

A server spends most of its start on imports, three processes times thousands of files. The nursery process imports
once; a server is then SGLang's own `run_server` in a fork of it, and its workers are forks in turn instead of fresh
interpreters. On CPUs only: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launch import WAITING_THREADS, Server, free_port, stop, wait_until_healthy

IMPORTED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)


class Nursery:
    """Context manager around the process that servers are forked from.

    Args:
        env: environment variables on top of this process's, for what is read when SGLang is imported.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._env = env or {}

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.warm_start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=WAITING_THREADS | os.environ | self._env,
        )
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)

    @contextlib.contextmanager
    def serve(self, model: str | Path, *args: str, log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
        """Like `benchmarks.launch.serve`."""
        port = free_port()
        fixed = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
        process = self._fork({"args": [*fixed, *args], "log": str(log), "errors": str(log), "env": env or {}})
        server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
        try:
            wait_until_healthy(server, 120)
            yield server
        finally:
            stop(server.process)

    def run(
        self, module: str, *args: object, env: dict[str, str] | None = None, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a module that ends by itself as `python -m module args` does; what it printed, and its status.

        Raises:
            psutil.TimeoutExpired: it takes longer than `timeout_s` seconds; it is gone then.
        """
        command = [module, *map(str, args)]
        with tempfile.TemporaryDirectory() as folder:
            log, errors, status = (Path(folder, name) for name in ("log", "errors", "status"))
            files = {"log": str(log), "errors": str(errors), "status": str(status)}
            process = self._fork({"module": module, "args": command[1:], "env": env or {}, **files})
            try:
                process.wait(timeout=timeout_s)
            finally:
                stop(process)
            code = int(status.read_text()) if status.is_file() else -1
            return subprocess.CompletedProcess(command, code, log.read_text(), errors.read_text())

    def _fork(self, order: dict[str, Any]) -> psutil.Process:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that servers are forked from has ended")
        return psutil.Process(int(answer))


def _main() -> None:
    """Fork a server or a program for every line of standard input; answer with its process id."""
    for module in IMPORTED:
        importlib.import_module(module)
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for spawn, which would import everything again.
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # What was imported stays: forks need not look through it for garbage, which would copy its pages.
    gc.collect()
    gc.freeze()
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
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND
            output, errors = (os.open(order[name], flags) for name in ("log", "errors"))
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (errors, 2)):
                os.dup2(source, target)
            os.environ.update(order["env"])
            if "module" in order:
                _run_module(order["module"], order["args"], Path(order["status"]))
            else:
                _run_server(order["args"])
            return
    finally:
        # Whoever asked for the servers may be gone without having stopped them.
        if os.getpid() == nursery:
            for server in servers:
                if server.is_running():
                    stop(server)


def _run_server(args: list[str]) -> None:
    import sglang.launch_server
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    # The scheduler reads these when it is imported, which was before the order.
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    load_plugins()
    sglang.launch_server.run_server(prepare_server_args(args))


def _run_module(module: str, args: list[str], status: Path) -> None:
    import torch

    # A program may compute before it starts servers, and OpenMP's threads do not survive the fork that a server is.
    torch.set_num_threads(1)
    sys.argv[1:] = args
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    status.write_text(str(code))


if __name__ == "__main__":
    _main()

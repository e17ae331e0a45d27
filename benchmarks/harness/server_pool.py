"""Start many SGLang servers, or programs that import it, each in seconds: as forks of a process that has imported it.

A server spends most of its start on imports, three processes times thousands of files. The servers process imports
once; a server is then SGLang's own launcher in a fork of it, and its workers are forks in turn instead of fresh
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.harness.launch import LAUNCH_SERVER, WAITING_THREADS, Server, free_port, stop, wait_until_healthy
from sgl_ragged.features import ROOMS

IMPORTED = (
    "sglang.srt.dllm.algorithm.base",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sgl_ragged.launch.resolution",
    "sgl_ragged.serve.hooks",
    *(f"sgl_ragged.features.{room}.{half}" for room in ROOMS for half in ("launch", "serve")),
)
"""Modules that servers import."""


class ServerPool:
    """Context manager around the process that servers are forked from.

    Args:
        env: environment variables on top of this process's, for what is read when SGLang is imported.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._env = env or {}

    def __enter__(self) -> ServerPool:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.server_pool"],
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
    def serve(
        self,
        model: str | Path,
        *args: str,
        log: Path,
        launcher: Sequence[str] = LAUNCH_SERVER,
        env: dict[str, str] | None = None,
        ready_within_s: float = 120,
    ) -> Iterator[Server]:
        """Like `benchmarks.harness.launch.serve`."""
        with self.start(model, *args, log=log, launcher=launcher, env=env) as server:
            wait_until_healthy(server, ready_within_s)
            yield server

    @contextlib.contextmanager
    def start(
        self,
        model: str | Path,
        *args: str,
        log: Path,
        launcher: Sequence[str] = LAUNCH_SERVER,
        env: dict[str, str] | None = None,
    ) -> Iterator[Server]:
        """The same without waiting for it, as for one of several nodes."""
        port = free_port()
        fixed = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
        server = Server(f"http://127.0.0.1:{port}", self._fork([*launcher, *fixed, *args], log, log, env), log)
        try:
            yield server
        finally:
            stop(server.process)

    def run(
        self, command: Sequence[str], *, timeout: float, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` with captured text, of `python -m module args` or a script in Python.

        Raises:
            psutil.TimeoutExpired: it takes longer than `timeout` seconds; it is gone then.
        """
        with tempfile.TemporaryDirectory() as folder:
            output, errors, status = (Path(folder, name) for name in ("output", "errors", "status"))
            process = self._fork(command, output, errors, env, status)
            try:
                process.wait(timeout=timeout)
            finally:
                stop(process)
            code = int(status.read_text()) if status.is_file() else -1
            return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())

    def _fork(
        self,
        command: Sequence[str],
        output: Path,
        errors: Path,
        env: dict[str, str] | None,
        status: Path | None = None,
    ) -> psutil.Process:
        order = {"command": command, "output": str(output), "errors": str(errors), "env": env or {}}
        if status is not None:
            order["status"] = str(status)
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
    servers, servers = os.getpid(), []
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
            output, errors = (os.open(order[name], flags) for name in ("output", "errors"))
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (errors, 2)):
                os.dup2(source, target)
            os.environ.update(order["env"])
            status = _execute(order["command"], program="status" in order)
            if "status" in order:
                Path(order["status"]).write_text(str(status))
            return
    finally:
        # Whoever asked for the servers may be gone without having stopped them.
        if os.getpid() == servers:
            for server in servers:
                if server.is_running():
                    stop(server)


def _execute(command: list[str], program: bool) -> int:
    """Run the command of a server or program in this fork; returns its exit status."""
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    # The scheduler reads these when it is imported, which was before the order.
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    # A program may compute before it starts servers, and a launcher before it starts workers; the threads of OpenMP do
    # not survive the forks that these are.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not program:
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(threads))
    try:
        sys.argv = command[1:] if command[0] == sys.executable else command
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _main()

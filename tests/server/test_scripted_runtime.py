"""SGLang's scripted runtime, unchanged, around a server of ours: aborts at each stage, retraction, little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import zmq
from sglang.srt.utils.network import get_zmq_socket_on_host
from sglang.test.scripted_runtime.http_server import ScriptedHttpServer
from sglang.test.scripted_runtime_chunked_helpers import LIFECYCLE_STAGES

from benchmarks.harness.launch import stop
from benchmarks.harness.server_pool import ServerPool
from tests.server import scripts
from tests.server.kit_server import pool_flags

pytestmark = pytest.mark.server

SEGMENT = 64
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", str(SEGMENT), "--max-running-requests", "8")
RAGGED = ("--ragged-profile", "uniform", "--ragged-segment", str(SEGMENT), "--ragged-ratio", "0.3")


class ScriptedProcess:
    """A process of psutil with what `ScriptedHttpServer` calls of multiprocessing's."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def is_alive(self) -> bool:
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def join(self, timeout: float) -> None:
        """Do not wait: the launcher outlives a scheduler that a script has ended, and `terminate` waits for it."""

    def terminate(self) -> None:
        stop(self._process)

    kill = terminate


@contextlib.contextmanager
def scripted(servers: ServerPool, model: Path, *flags: str, folder: Path) -> Iterator[ScriptedHttpServer]:
    """Run a server whose scheduler takes steps as scripts say."""
    context, errors = zmq.Context(), folder / "errors.json"
    errors.touch()
    port, socket = get_zmq_socket_on_host(context, zmq.PAIR, host="127.0.0.1")
    env = {
        "SGLANG_TEST_SCRIPTED_RUNTIME": "1",
        "SGLANG_TEST_SCRIPTED_RUNTIME_IPC_ADDR": f"tcp://127.0.0.1:{port}",
        "SGLANG_TEST_SCRIPTED_RUNTIME_OUT_OF_BAND_ERROR_PATH": str(errors),
        # The inspector of the tree's Rust core needs sources that are not in the wheel.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    with servers.start(model, *flags, log=folder / "log", env=env) as server:
        runtime = ScriptedHttpServer(
            ctx=context,
            socket=socket,
            server_process=ScriptedProcess(server.process),
            out_of_band_error_path=errors,
            http_port=urlsplit(server.url).port,
        )
        try:
            runtime._await_handshake()
            runtime._await_http_ready()
            yield runtime
        finally:
            runtime.shutdown()


@pytest.fixture(scope="module")
def runtime(request, servers, character_model, tmp_path_factory) -> Iterator[ScriptedHttpServer]:
    folder, pool = tmp_path_factory.mktemp("scripted"), pool_flags(request, "4MiB")
    flags = (*FLAGS, *pool, *(RAGGED if "ragged" in pool else ()))
    with scripted(servers, character_model, *flags, folder=folder) as found:
        yield found


@pytest.mark.parametrize("stage", LIFECYCLE_STAGES)
def test_abort(runtime, stage):
    runtime.execute_script(scripts.abort_at, args=(stage, 230))


def test_retraction(runtime):
    runtime.execute_script(scripts.retract, args=([75, 100, 125],))


@pytest.mark.parametrize("missing", [0, 1])
def test_little_memory(runtime, missing):
    """Requests run one after the other in the fewest pages that docs/operate.md names, and not in one page fewer."""
    runtime.execute_script(scripts.little_memory, args=(missing, 75, 62))

"""The process that calibrates for a server: it ends with its starter, however that ends, and has the lock till then."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from calib.engine import Engine
from calib.recorder import Recorder
from sgl_ragged.launch import calibration_process
from tests.calib.test_recorder import make_settings

STARTER = """
import sys
from sgl_ragged.launch.calibration_process import _run

with open(sys.argv[1], "w") as lock:
    import fcntl
    fcntl.flock(lock, fcntl.LOCK_EX)
    sys.exit(_run([sys.executable, "-c", sys.argv[2], sys.argv[3]], lock.fileno()))
"""

CALIBRATION = """
import os, subprocess, sys, time
from calib.run import end_with_input

end_with_input()
worker = subprocess.Popen(["sleep", "300"])
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {worker.pid}")
os.replace(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(300)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_nothing_is_left_when_the_starter_ends(tmp_path, end):
    pids, lock = tmp_path / "pids", tmp_path / "lock"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(lock), CALIBRATION, str(pids)],
        stderr=subprocess.PIPE,
        # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not pids.is_file():
        assert starter.poll() is None, starter.stderr.read()
        time.sleep(0.05)
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    try:
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        starter.send_signal(end)
        starter.wait(30)
        if end == signal.SIGINT:
            assert starter.returncode == 130
            (line,) = starter.stderr.read().decode().splitlines()
            assert line.startswith("sgl_ragged: interrupted while calibrating")
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        starter.stderr.close()


def test_the_lock_lives_as_long_as_the_calibration(tmp_path):
    """A starter may be gone, and its calibration still busy for a moment."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code = "import os, sys; os.fstat(int(sys.argv[1]))"
        assert calibration_process._run([sys.executable, "-c", code, str(lock.fileno())], lock.fileno()) == 0


def test_ended_workers_are_reaped(tmp_path, monkeypatch):
    """They would stay as zombies for the minutes in which gates are trained."""
    worker = subprocess.Popen(["sleep", "300"])
    # The tests' own servers are children of this process, too, and stay.
    children = psutil.Process.children

    def workers(self: psutil.Process, recursive: bool) -> list[psutil.Process]:
        return [one for one in children(self, recursive=recursive) if one.pid == worker.pid]

    monkeypatch.setattr(psutil.Process, "children", workers)

    class Sglang:
        def shutdown(self):
            os.kill(worker.pid, signal.SIGKILL)

    engine = Engine(make_settings(), Recorder(str(tmp_path), ()), 1)
    engine._engine = Sglang()
    engine.close()
    assert not psutil.pid_exists(worker.pid)


START = """
import subprocess, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

load_plugins()
from sgl_ragged.launch import calibration_process

calibration_process._run = lambda command, lock: subprocess.call([*command, "--help"])
args = prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu", "--kv-pool", "ragged"])
args.resolve_once()
"""


@pytest.mark.thorough
def test_a_start_in_a_folder_with_names_of_ours(tmp_path):
    """The calibrator that is installed runs, whatever lies in the working folder or in a folder of PYTHONPATH."""
    from tests.character_model import make_character_model

    model, folder = make_character_model(tmp_path / "model"), tmp_path / "folder"
    (folder / "more" / "calib").mkdir(parents=True)
    (folder / "calib").mkdir()
    for name in ("calib/__init__.py", "calib/built_in.py", "more/calib/__init__.py", "benchmarks.py", "tests.py"):
        (folder / name).write_text("raise SystemExit('the wrong module')")
    env = os.environ | {"SGLANG_RAGGED_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(folder / "more")}
    done = subprocess.run(
        [sys.executable, "-c", START, str(model)], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert "wrong module" not in done.stdout + done.stderr
    assert "--hidden-states BYTES" in done.stdout
    # The help is no profile.
    assert "the model could not be calibrated (status 0" in done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.server
def test_a_launcher_that_is_ended_leaves_nothing_and_the_next_goes_on(tmp_path, monkeypatch):
    """The launcher itself, with a model that spells characters: ended while it calibrates, and two at once after it."""
    from benchmarks.harness.launch import free_port, stop
    from tests.character_model import make_character_model

    model = make_character_model(tmp_path / "model")
    cache = tmp_path / "cache"
    monkeypatch.setenv("SGLANG_RAGGED_CACHE", str(cache))
    flags = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--kv-pool", "ragged"]
    flags += ["--kv-bytes", "64MiB", "--max-running-requests", "2", "--skip-server-warmup", "--host", "127.0.0.1"]

    def start(log: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(free_port())]
        with log.open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def recorded() -> dict[str, int]:
        found = cache.glob("*.recordings-*/sample-?????.safetensors")
        return {path.name: path.stat().st_ino for path in found}

    first = start(tmp_path / "first.log")
    while len(recorded()) < 3:
        assert first.poll() is None, (tmp_path / "first.log").read_text()[-3000:]
        time.sleep(0.2)
    family = psutil.Process(first.pid).children(recursive=True)
    assert len(family) >= 2
    first.send_signal(signal.SIGTERM)
    first.wait(30)
    assert not psutil.wait_procs(family, timeout=30)[1]
    before = recorded()
    assert not list(cache.glob("*.safetensors"))

    both = [start(tmp_path / f"{name}.log") for name in ("second", "third")]
    try:
        while not list(cache.glob("*.safetensors")):
            assert all(process.poll() is None for process in both)
            now = recorded()
            if len(now) > len(before):
                # Taken over, not recorded again.
                assert {name: now[name] for name in before} == before
            time.sleep(0.1)
        texts = [(tmp_path / f"{name}.log").read_text() for name in ("second", "third")]
        assert sum("another process is calibrating" in text for text in texts) == 1
        assert sum("calibrating gate, once" in text for text in texts) == 1
    finally:
        for process in both:
            stop(process)
    assert len(list(cache.glob("*.safetensors"))) == 1


HIDES = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name in ("matplotlib", "rich", "scipy") else found(name, path, target)


PathFinder.find_spec = find_spec
"""


@pytest.mark.thorough
@pytest.mark.server
def test_a_server_without_the_packages_of_calibration(tmp_path, monkeypatch):
    """Equal budgets serve; the default says in one line what is missing."""
    from benchmarks.harness.errors import ServerFailed
    from benchmarks.harness.launch import serve
    from tests.character_model import make_character_model
    from tests.server.client import generate

    model = make_character_model(tmp_path / "model")
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "sitecustomize.py").write_text(HIDES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'hides'}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("SGLANG_RAGGED_CACHE", str(tmp_path / "cache"))
    flags = ["--device", "cpu", "--dtype", "float32", "--kv-pool", "ragged", "--kv-bytes", "64MiB"]
    flags += ["--max-running-requests", "2"]
    with pytest.raises(ServerFailed) as ended, serve(model, *flags, log=tmp_path / "auto.log"):
        pass
    lines = [line for line in str(ended.value).splitlines() if line.startswith("sgl_ragged: ")]
    assert len(lines) == 1
    assert "calibrating it needs matplotlib, rich, scipy: install sgl-ragged[calibrate]" in lines[0]
    with serve(model, *flags, "--ragged-profile", "uniform", log=tmp_path / "uniform.log") as server:
        assert len(generate(server, range(4, 40), 3).tokens) == 3

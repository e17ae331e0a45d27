"""The accuracy benchmark on both pools; a server that is killed costs its cell only, and the same command goes on."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy.cells import Cell
from benchmarks.harness import pools
from benchmarks.harness.results import Results

pytestmark = [pytest.mark.server, pytest.mark.thorough]

CONVERSATIONS, QUESTIONS = 2, 4
COMMAND = ["--conversations", str(CONVERSATIONS), "--questions", str(QUESTIONS), "--segment", "128"]
COMMAND += ["--scorer", "keydiff", "--budgets", "uniform", "--ratio", "0.3", "--kv-bytes", "64MiB"]


@pytest.fixture
def benchmark(servers, monkeypatch):
    """Runs the benchmark; its servers are forked from the tests' servers, which is there already."""

    class Shared:
        serve = staticmethod(servers.serve)

        def __enter__(self) -> Shared:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["accuracy", *arguments])
        accuracy.main()

    monkeypatch.setattr(pools, "ServerPool", Shared)
    return run


def no_server(*_: object) -> None:
    raise AssertionError("a server was about to be started")


def test_a_killed_server_costs_its_cell_only(benchmark, tmp_path, monkeypatch, capsys):
    path = tmp_path / "accuracy.json"
    command = [*COMMAND, "--output", str(path)]
    killer = threading.Thread(target=kill_the_ragged_server, args=(path.with_suffix(".log"),))
    killer.start()
    with pytest.raises(SystemExit) as caught:
        benchmark(*command)
    killer.join()
    said = caught.value.code
    assert said.startswith("accuracy: the server of keydiff, uniform, ratio 0.3 is gone (")
    assert f"1 of 2 servers are finished, their cells are in {path}" in said
    assert "\n" not in said
    kept = Results.load(path, "accuracy").as_kind(Cell)
    assert [cell.pool for cell in kept.values()] == ["token"]

    benchmark(*command)
    token, ragged = Results.load(path, "accuracy").as_kind(Cell).values()
    assert [token] == list(kept.values())
    assert (token.score, token.asked, ragged.asked) == (1.0, CONVERSATIONS * QUESTIONS, CONVERSATIONS * QUESTIONS)
    assert ragged.score >= 0.75
    # The second question of a conversation and later ones find all whole segments before them.
    assert min(token.cached, ragged.cached) > 0.9
    assert ragged.mean_share == pytest.approx(0.3, abs=0.02)
    assert not path.with_suffix(".log").exists()
    # Once more: all is there, and no server starts.
    capsys.readouterr()
    monkeypatch.setattr(accuracy, "Started", no_server)
    benchmark(*command, "--json")
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def kill_the_ragged_server(log: Path) -> None:
    """As soon as it answers questions."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        text = log.read_text() if log.is_file() else ""
        if "ragged KV pool" in text and "POST /generate" in text:
            for child in psutil.Process().children(recursive=True):
                # A server leads a session of its own; servers of other tests may be up, and write elsewhere. Some of
                # these processes end while they are looked at.
                with contextlib.suppress(psutil.Error, OSError):
                    if os.getsid(child.pid) == child.pid and str(log) in {file.path for file in child.open_files()}:
                        child.kill()
                        return
        time.sleep(0.02)

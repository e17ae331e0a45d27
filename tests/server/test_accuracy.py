"""Accuracy suites on both pools: files in the shapes of RULER and SCBench, in the recall model's language."""

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
from benchmarks.accuracy.store import Results
from benchmarks.demo import MODEL
from benchmarks.harness import pools
from benchmarks.recall.questions import Interview, interviews
from benchmarks.recall.task import ASSISTANT, EOS, QUESTION, USER, VOCABULARY

pytestmark = pytest.mark.server

TALKS = interviews(3, 4, seed=2**36, turns=4, tokens_per_turn=220)
SEGMENT = 128
SERVERS = ["--model", str(MODEL), "--scorer", "keydiff", "--budgets", "uniform", "--ratio", "0.3"]
SERVERS += ["--segment", str(SEGMENT), "--kv-bytes", "64MiB"]


def context(talk: Interview) -> str:
    return " ".join(VOCABULARY[token] for token in talk.history)


def ask(key: str) -> str:
    return f"{USER} {QUESTION} {key} {ASSISTANT}"


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def ruler(tmp_path) -> Path:
    lines = [
        {
            "index": number,
            "input": f"{context(talk)}\n{ask(talk.facts[0].key)}",
            "outputs": [talk.facts[0].value],
            "answer_prefix": "",
        }
        for number, talk in enumerate(TALKS)
    ]
    for task in ("niah_single_1", "niah_multikey_1"):
        write(tmp_path / "ruler" / "4096" / "data" / task / "validation.jsonl", lines)
    return tmp_path / "ruler"


@pytest.fixture
def scbench(tmp_path) -> Path:
    lines = [
        {
            "id": number,
            "context": context(talk),
            # The end of the turn before belongs to a question: references have none.
            "multi_turns": [
                {"input": f"{EOS} {ask(fact.key)}" if turn else ask(fact.key), "answer": fact.value}
                for turn, fact in enumerate(talk.facts)
            ],
        }
        for number, talk in enumerate(TALKS)
    ]
    write(tmp_path / "scbench" / "scbench_hashhop.jsonl", lines)
    return tmp_path / "scbench"


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


def requests_of(results: Results) -> list[dict]:
    return [json.loads(line) for line in results.requests.read_text().splitlines()]


@pytest.mark.thorough
def test_ruler_asks_after_the_context_is_in_the_cache(ruler, benchmark, tmp_path, monkeypatch, capsys):
    path = tmp_path / "ruler.json"
    command = ["--suite", "ruler", "--data", str(ruler), "--output", str(path), *SERVERS]
    benchmark(*command)
    results = Results.load(path)
    assert {cell.task for cell in results.cells} == {"4096/niah_single_1", "4096/niah_multikey_1"}
    assert [(cell.pool, cell.score, cell.asked) for cell in results.cells] == [
        *[("token", 1.0, 3)] * 2,
        *[("ragged", 1.0, 3)] * 2,
    ]
    assert all(cell.cached > 0.8 for cell in results.cells)
    assert results.cells[-1].mean_share == pytest.approx(0.3, abs=0.02)
    assert {one["turn"] for one in requests_of(results)} == {1}
    assert path.with_suffix(".png").is_file()
    assert not path.with_suffix(".log").exists()
    assert "by task" in capsys.readouterr().out
    # Once more: all is there, no server starts, and the same is printed.
    monkeypatch.setattr(accuracy, "Started", no_server)
    benchmark(*command, "--json")
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_turns_of_scbench_and_a_killed_server_costs_its_cell_only(scbench, benchmark, tmp_path, capsys):
    path = tmp_path / "scbench.json"
    command = ["--suite", "scbench", "--data", str(scbench), "--max-length", "700", "--output", str(path), *SERVERS]
    killer = threading.Thread(target=kill_the_ragged_server, args=(path.with_suffix(".log"),))
    killer.start()
    with pytest.raises(SystemExit) as caught:
        benchmark(*command)
    killer.join()
    said = caught.value.code
    assert said.startswith("accuracy: the server of keydiff, uniform, ratio 0.3 is gone (")
    assert f"1 of 2 servers are finished, their cells are in {path}" in said
    assert "\n" not in said
    (kept,) = Results.load(path).cells
    assert kept.pool == "token"

    capsys.readouterr()
    benchmark(*command, "--json")
    printed = capsys.readouterr()
    assert "3 of them lost the middle of their context" in printed.err
    results = Results.load(path)
    assert json.loads(printed.out) == json.loads(path.read_text())
    token, ragged = results.cells
    assert token == kept
    assert (ragged.pool, ragged.task, ragged.asked) == ("ragged", "hashhop", 12)
    assert (results.prompts.cut, results.prompts.max_length) == (3, 700)
    asked = requests_of(results)
    for one in asked:
        if one["turn"] == 1:
            # One that begins behind another shares the first two words with it, less than a segment.
            assert one["sent_before"] == 0
            assert one["cached"] <= (0 if one["pool"] == "ragged" else 2)
        elif one["pool"] == "ragged":
            assert one["cached"] >= one["sent_before"] // SEGMENT * SEGMENT > 0
        else:
            assert one["cached"] >= one["sent_before"] > 600
    assert max(one["prompt"] for one in asked) == 700
    # What was in the middle is lost on both pools alike, what was not is found.
    assert 0.3 < token.score < 1
    assert ragged.score == token.score


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

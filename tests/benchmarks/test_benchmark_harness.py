"""Requests, pools, results, tables and the end of commands, as benchmarks share them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError
from benchmarks.harness.pools import Pool, server_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Table
from sgl_ragged.errors import RaggedConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ANSWER = {"output_ids": [7], "meta_info": {"finish_reason": {"type": "length"}, "cached_tokens": 3}}


def client(answer) -> ServerClient:
    """A client whose requests `answer` answers; it returns a status and a document, or raises."""

    def handle(request: httpx.Request) -> httpx.Response:
        status, document = answer(request)
        return httpx.Response(status, json=document)

    made = ServerClient("http://server/")
    made._http = httpx.Client(transport=httpx.MockTransport(handle), base_url=made.url)
    return made


def test_a_prompt_is_sent_as_ids_and_decoded_greedily():
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return 200, ANSWER

    asked = client(answer)
    assert asked.generate((1, 2), 5) == ANSWER
    asked.generate([1], 1, ignore_eos=True, return_hidden_states=True)
    plain, full = sent
    assert plain["input_ids"] == [1, 2]
    assert plain["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": False}
    assert "return_hidden_states" not in plain
    assert full["return_hidden_states"]
    assert full["sampling_params"]["ignore_eos"]


@pytest.mark.parametrize(
    ("status", "document"),
    [(400, {"error": "too\n long"}), (200, {"meta_info": {"finish_reason": {"type": "abort"}}}), (200, {})],
)
def test_a_refused_prompt_is_one_line(status, document):
    with pytest.raises(PointFailed, match="the server refused a prompt of 2 tokens: ") as refused:
        client(lambda _: (status, document)).generate([1, 2], 5)
    assert "\n" not in str(refused.value)


def test_a_server_that_is_gone_is_lost_whatever_was_asked():
    def gone(request):
        raise httpx.ConnectError("refused")

    lost = client(gone)
    for ask in (lambda: lost.generate([1], 1), lost.flush, lost.ragged, lost.pool_tokens, lost.check_alive):
        with pytest.raises(ServerLost):
            ask()
    assert not lost.is_healthy()
    with pytest.raises(ServerLost, match="something else keeps it busy"):
        client(lambda _: (400, {})).flush()


@pytest.mark.parametrize(("name", "slabs"), [("ragged@0.3", "wide"), ("ragged@0.3+slab-dtype=k8v4", "k8v4")])
def test_pools_are_wide_unless_their_names_say_otherwise(name, slabs):
    flags = server_arguments(Pool.parse(name), 4, "8MiB", on_cpu=True)
    assert flags[flags.index("--ragged-slab-dtype") + 1] == slabs
    assert not [flag for flag in server_arguments(Pool(None), 4, "8MiB", on_cpu=True) if flag.startswith("--ragged")]


@pytest.mark.parametrize("text", ["", "ragged@", "ragged@1.5", "ragged@x", "token@0.5", "ragged@0.5+history"])
def test_what_is_no_pool_is_refused(text):
    pool = Pool.parse("ragged@0.5+profile=a/b.safetensors+history=1024")
    assert pool.name == "ragged@0.5+profile=b+history=1024"
    assert pool.flags == ["--ragged-profile", "a/b.safetensors", "--ragged-history", "1024"]
    with pytest.raises(SettingsError, match="is no pool"):
        Pool.parse(text)


def test_drafts_are_sglangs():
    pool = Pool.parse("ragged@0.3+draft=4+scorer=h2o")
    assert pool.drafts == 4
    assert pool.flags[:2] == ["--ragged-scorer", "h2o"]
    assert pool.flags[-2:] == ["--speculative-num-draft-tokens", "4"]


@dataclass(frozen=True)
class Entry:
    score: float
    places: tuple[int, ...]


def test_results_are_continued_with_the_same_settings_and_refused_with_others(tmp_path):
    path, settings = tmp_path / "found.json", {"limit": 1, "machine": {"torch": "2"}}
    results = Results.open(path, "accuracy", settings)
    assert not path.exists()
    results.add("one", Entry(0.5, (1, 2)))
    again = Results.open(path, "accuracy", settings | {"new": 3})
    assert again.as_kind(Entry) == {"one": Entry(0.5, [1, 2])}
    assert (again.entries, again.about) == (results.entries, results.about)
    other = {"limit": 5, "machine": {"torch": "3"}}
    with pytest.raises(SettingsError, match=r"limit: there 1, here 5; machine\.torch: there 2, here 3\)") as refused:
        Results.open(path, "accuracy", other)
    assert "\n" not in str(refused.value)
    again.entries.clear()
    again.write()
    # A file without entries takes other settings.
    assert Results.open(path, "accuracy", other).settings == other


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"benchmark": "storm", "settings": {}}', "\x00"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="cannot be read as results of accuracy") as refused:
        Results.open(path, "accuracy", {})
    assert "\n" not in str(refused.value)
    assert path.read_text() == text
    with pytest.raises(SettingsError, match="folder that exists"):
        Results.open(tmp_path / "none" / "new.json", "accuracy", {})


def test_every_result_of_this_repository_is_listed_with_its_command():
    page = (RESULTS / "README.md").read_text()
    for path in RESULTS.glob("*.json"):
        assert f"`{path.name}`" in page
        assert set(json.loads(path.read_text())) == {"benchmark", "settings", "about", "entries"}


TABLE = Table(
    "times",
    ("pool", "time to first token", "retractions", "accuracy"),
    (("token", "1,234.5", "0", "0.500 (0.25-0.75)"), ("ragged@0.3", "98,765.4", "12", "0.250 (0.10-0.40)")),
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingsError("no"), "name: no"),
        (RaggedConfigError("quoted\n  text"), "name: quoted text"),
        (ServerFailed("server ended:\nValueError: why\n"), "name: a server did not start: ValueError: why"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_command_ends_with_a_line_or_a_status(error, status):
    with pytest.raises(SystemExit) as ended, command("name"):
        raise error
    assert ended.value.code == status


def test_a_kill_unwinds_the_stack_and_other_errors_keep_their_traceback():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, command("name"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    with pytest.raises(ZeroDivisionError), command("name"):
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_command_lists_and_runs_every_benchmark():
    door = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(door, capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in listed for name in BENCHMARKS)
    run = subprocess.run([*door, "random_model", "--help"], capture_output=True, text=True, check=True)
    assert "python -m benchmarks random_model" in run.stdout
    unknown = subprocess.run([*door, "random"], capture_output=True, text=True)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)

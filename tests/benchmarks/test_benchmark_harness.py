"""What benchmarks share: requests to a server, result files, and how a command ends."""

from __future__ import annotations

import json
import os
import signal
import sys

import httpx
import pytest

from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError
from benchmarks.harness.result_file import differences
from sgl_ragged.errors import RaggedConfigError

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
        sent.append((request.url.path, json.loads(request.content)))
        return 200, ANSWER

    asked = client(answer)
    assert asked.generate((1, 2), 5) == ANSWER
    asked.generate([1], 1, ignore_eos=True, return_hidden_states=True)
    assert [path for path, _ in sent] == ["/generate"] * 2
    plain, full = (body for _, body in sent)
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
    with pytest.raises(ServerLost, match="/server_info answers 500"):
        client(lambda _: (500, {})).longest_prompt()


def test_facts_come_from_the_server_info():
    facts = {"max_req_input_len": 100, "max_total_num_tokens": 512, "ragged": {"summary": "ragged KV pool"}}
    asked = client(lambda request: (200, facts if request.url.path == "/server_info" else {}))
    assert (asked.longest_prompt(), asked.pool_tokens()) == (100, 512)
    assert asked.start_up_line() == "ragged KV pool"
    assert client(lambda _: (200, {"max_req_input_len": 1})).start_up_line() == ""


def test_settings_that_differ_are_named_by_their_path():
    there, here = {"limit": 8, "machine": {"torch": "2"}}, {"limit": 8, "machine": {"torch": "3"}, "new": 1}
    assert differences(there, here) == "machine.torch: there 2, here 3; new: there None, here 1"
    assert differences(there, here, recorded_only=True) == "machine.torch: there 2, here 3"
    assert differences(there, there) == ""


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


def test_results_name_the_command_that_made_them(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py", "--ratio", "0.3", "--text", "a b"])
    assert provenance("benchmarks.x")["command"] == "python -m benchmarks.x --ratio 0.3 --text 'a b'"

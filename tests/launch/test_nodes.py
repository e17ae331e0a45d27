"""Launchers of several nodes meet, compare what they are, and make one plan; real sockets on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.launch import free_port
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.launch import nodes
from sgl_ragged.launch.model_source import weights_sample
from sgl_ragged.launch.node_link import Link, LinkLost, NoNode
from sgl_ragged.launch.node_plan import Decided
from sgl_ragged.launch.nodes import Introduction, Nodes, meeting

FACTS = {"sgl-ragged": "1.0", "SGLang": "0.5.23", "model": "Llama", "weights": "ab", "--ragged-ratio": 0.3, "--tp": 2}


def node(number: int, **changed: Any) -> Introduction:
    return Introduction(number, "abcdefgh"[number] + "-host", FACTS | changed)


@pytest.fixture(autouse=True)
def stays(monkeypatch) -> None:
    """This process does not end with its nodes."""
    monkeypatch.setattr(Nodes, "watch", lambda nodes: None)


def pair() -> tuple[Link, Link]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return Link(here), Link(server.accept()[0])


def meet(
    others: list[Introduction],
    count: int = 2,
    *,
    talk: Callable[[Nodes], Any] = lambda nodes: None,
    within_s: float = 30,
) -> list[Any]:
    """What `talk` returns or raises on the first node and on `others`, as text where it is an error."""
    address = ("127.0.0.1", free_port())

    def join(own: Introduction) -> Any:
        try:
            with meeting(own, address, count, within_s) as found:
                return talk(found)
        except RaggedConfigError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(join, [node(0), *others]))


def test_nodes_talk_once_all_have_come():
    def talk(found: Nodes) -> Any:
        if found.own.number == 0:
            found.tell({"waiting": "a moment"})
            found.tell({"plan": 7}, {"profile": b"\0" * 3_000_000, "empty": b""})
            return {name: message["digest"] for name, (message, _) in found.hear().items()}
        ((message, files),) = found.hear().values()
        found.tell({"digest": f"of {found.own.number}"})
        return message, {name: len(content) for name, content in files.items()}

    first, *others = meet([node(2), node(1)], 3, talk=talk)
    assert first == {"node 1 (b-host)": "of 1", "node 2 (c-host)": "of 2"}
    assert others == [({"plan": 7}, {"profile": 3_000_000, "empty": 0})] * 2


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"sgl-ragged": "1.1", "--ragged-ratio": 0.5},
            "node 1 (b-host) has sgl-ragged 1.1, node 0 (a-host) has 1.0: install the same release on all nodes",
        ),
        (
            {"SGLang": "0.5.22"},
            "node 1 (b-host) has SGLang 0.5.22, node 0 (a-host) has 0.5.23: install the same release on all nodes",
        ),
        ({"model": "Qwen"}, "node 1 (b-host) has model Qwen, node 0 (a-host) has Llama: give all nodes the same model"),
        ({"weights": "cd"}, "node 1 (b-host) has weights cd, node 0 (a-host) has ab: give all nodes the same model"),
        (
            {"--ragged-ratio": 0.5},
            "node 1 (b-host) has --ragged-ratio 0.5, node 0 (a-host) has 0.3: give all nodes the same flags",
        ),
        (
            {"--of-a-later-release": 1},
            "node 1 (b-host) has --of-a-later-release 1, node 0 (a-host) has None: give all nodes the same flags",
        ),
    ],
)
def test_what_differs_is_one_line_with_both_names(changed, line):
    assert meet([node(1, **changed)]) == [line, line]


def test_weights_that_are_not_there_yet_are_not_compared(caplog):
    assert meet([node(1, weights=None)]) == [None, None]
    assert "not compared" in caplog.text


def test_all_hear_that_one_differs():
    line = "node 2 (c-host) has --tp 4, node 0 (a-host) has 2: give all nodes the same flags"
    first, one, two = meet([node(1), node(2, **{"--tp": 4})], 3)
    assert (first, two) == (line, line)
    # Whoever comes after that finds nobody.
    assert one == line or "node 1 (b-host)" in one


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([node(1), node(1)], "node 1 (b-host) has come already; give each node a --node-rank of its own"),
        ([node(1), node(3)], "node 3 (d-host) cannot join node 0 (a-host): --node-rank must be below 3"),
    ],
)
def test_every_node_has_a_number_of_its_own(others, words):
    assert words in meet(others, 3, within_s=5)[0]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_node_that_cannot_start_is_heard(refusing):
    def talk(found: Nodes) -> None:
        if found.own.number == refusing:
            raise RaggedConfigError("there is no profile; make one")
        found.hear()

    name = node(refusing).name
    own, other = "there is no profile; make one", f"{name} does not start: there is no profile; make one"
    assert sorted(meet([node(1)], talk=talk)) == sorted([own, other])


def test_nodes_wait_for_so_long_only():
    (said,) = meet([], within_s=0.2)
    assert said.startswith("nodes [1] have not come to node 0 (a-host)")
    with pytest.raises(RaggedConfigError, match=r"node 1 \(b-host\) cannot reach the first node at 127.0.0.1"):
        nodes.join_first(node(1), ("127.0.0.1", free_port()), 0.2)


def test_a_first_node_without_the_pool_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"\0" * 100), daemon=True).start()
        with pytest.raises(RaggedConfigError, match="is no first node with --kv-pool ragged"):
            nodes.join_first(node(1), server.getsockname(), 5)


def test_strangers_are_sent_away(caplog):
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor() as pool:
        first = pool.submit(nodes.await_nodes, node(0), address, 2, 30)
        deep = b"[" * 100_000
        nobody = {"message": {"node": {"number": [], "host": 1, "facts": 2}}, "files": {}}
        told = (b"{}", b"null", deep, json.dumps(nobody).encode())
        for said in (b"GET / HTTP/1.1\r\n\r\n", *(len(head).to_bytes(8, "big") + head for head in told)):
            stranger = nodes._connect(node(1), address, 10)
            stranger.socket.sendall(said)
            with contextlib.suppress(ConnectionError):
                assert stranger.socket.recv(1) == b""
            stranger.close()
        other = nodes.join_first(node(1), address, 10)
        assert list(first.result(timeout=10)) == ["node 1 (b-host)"]
        assert list(other) == ["node 0 (a-host)"]
    assert caplog.text.count("is no node with --kv-pool ragged") == 5


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(RaggedConfigError, match=r"192\.0\.2\.1:20000 is no address of the first node"):
        nodes.await_nodes(node(0), ("192.0.2.1", 20000), 2, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RaggedConfigError, match="is in use"):
        nodes.await_nodes(node(0), taken.getsockname(), 2, 1)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_ends_ends_the_other(monkeypatch, gone):
    """The connection closes with its process, however that ends."""
    ended: list[str] = []
    monkeypatch.setattr(nodes, "end_process", ended.append)
    here, there = pair()
    own, other = node(1 - gone), node(gone)
    there.close()
    Nodes(own, {other.name: here})._end_with_others()
    assert ended == [f"{other.name} has ended, and a model over several nodes needs all of them; so does {own.name}"]


def test_a_fork_does_not_keep_a_connection_alive():
    here, there = pair()
    os.register_at_fork(after_in_child=here.leave_to_parent)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        here.send({"still": "there"})
        assert there.receive(5)[0] == {"still": "there"}
        # As the system does it when the parent ends: without a word.
        here.socket.close()
        with pytest.raises(LinkLost):
            there.receive(5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_messages_are_whole_or_refused():
    here, there = pair()
    here.send({"a": [1, None]}, {"b": b"123"})
    assert there.receive(1) == ({"a": [1, None]}, {"b": b"123"})
    with pytest.raises(NoNode):
        there.receive(0.05)
    for head in (
        {"message": 1, "files": {}},
        {"message": {}, "files": {"f": -1}},
        {"message": {}, "files": {"f": "x"}},
    ):
        body = json.dumps(head).encode()
        here.socket.sendall(len(body).to_bytes(8, "big") + body)
        with pytest.raises(NoNode):
            there.receive(1)
    here.socket.sendall((2**40).to_bytes(8, "big"))
    with pytest.raises(NoNode):
        there.receive(1)
    here.socket.sendall((10).to_bytes(8, "big") + b"{")
    here.close()
    with pytest.raises(LinkLost):
        there.receive(1)


@pytest.mark.parametrize("mode", [None, "permute", "split"])
def test_what_was_decided_arrives_as_it_was(mode):
    kept = np.array([[16, 80, 32, 32], [64, 16, 16, 16]])
    placement = None if mode is None else plan_placement(kept, 2, mode)
    files = {"ragged_profile": b"profile"}
    decided = Decided("gate", "/there/p.safetensors", "budgets from there", kept, placement, files, "0" * 15)
    here, there = pair()
    here.send(*decided.message())
    found = Decided.from_message(*there.receive(1))
    told = ("scorer", "profile", "source", "digest")
    assert [getattr(found, name) for name in told] == [getattr(decided, name) for name in told]
    assert found.files == files
    assert found.kept.tolist() == kept.tolist()
    if placement is None:
        assert found.placement is None
    else:
        assert found.placement is not None
        assert (found.placement.mode, found.placement.heads.tolist()) == (mode, placement.heads.tolist())
        assert found.placement.kept.tolist() == placement.kept.tolist()


def test_samples_of_weights_see_one_changed_block(tmp_path):
    view = SimpleNamespace(model_path=str(tmp_path), revision=None)
    assert weights_sample(view) is None
    content = np.random.default_rng(0).bytes(3_000_000)
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    first = weights_sample(view)
    file.touch()
    assert weights_sample(view) == first
    (tmp_path / "other.bin").write_bytes(b"not read beside safetensors")
    assert weights_sample(view) == first
    file.write_bytes(content[:-5000] + b"\1" * 5000)
    assert weights_sample(view) != first
    file.write_bytes(content + b"\0")
    assert weights_sample(view) != first

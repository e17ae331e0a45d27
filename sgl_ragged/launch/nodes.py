"""Have the launchers of several nodes meet before any worker starts, and end together.

They meet at --dist-init-addr, where the workers will meet later: the first node listens there until all other nodes
have come, so no other port is needed. The connections stay open, and nothing is sent on them once the start is agreed
on: they only show when a node has ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.node_link import Link, LinkLost, NoNode

logger = logging.getLogger(__name__)

_RETRY_S, _INTRODUCED_WITHIN_S = 0.5, 10.0

REMEDIES = MappingProxyType(
    {
        "sgl-ragged": "install the same release on all nodes",
        "SGLang": "install the same release on all nodes",
        "model": "give all nodes the same model",
        "weights": "give all nodes the same model",
    }
)
"""Advice for a fact that differs between nodes; for facts that are not listed, to give the same flags."""


class NodesDiffer(RaggedConfigError):
    """The nodes differ. The message names them and is the same on all of them."""


@dataclass(frozen=True)
class Introduction:
    """A node's introduction.

    number: --node-rank. facts: values of JSON by name that must be equal on all nodes; None for an unknown one.
    """

    number: int
    host: str
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.host})"

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Introduction:
        """Read an introduction that was sent as `asdict` of one. Raises NoNode for anything else."""
        said = message.get("node")
        if not isinstance(said, dict) or set(said) != {"number", "host", "facts"}:
            raise NoNode("no introduction")
        if not isinstance(said["number"], int) or not isinstance(said["facts"], dict):
            raise NoNode("no introduction")
        return cls(said["number"], str(said["host"]), said["facts"])


def difference(first: Introduction, other: Introduction) -> str | None:
    """Return one line about the first fact that differs, with both nodes' names; None if all are equal."""
    for what in dict.fromkeys((*first.facts, *other.facts)):
        here, there = first.facts.get(what), other.facts.get(what)
        if what == "weights" and None in (here, there):
            continue
        if here != there:
            remedy = REMEDIES.get(what, "give all nodes the same flags")
            return f"{other.name} has {what} {there}, {first.name} has {here}: {remedy}"
    return None


class Nodes:
    """Connections to the other nodes: the first node has one to each, the other nodes one to the first.

    Args:
        own: this node's introduction.
        links: connections by the other nodes' names.
    """

    def __init__(self, own: Introduction, links: Mapping[str, Link]) -> None:
        self.own = own
        self._links = links

    def tell(self, message: Mapping[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Send a message to all nodes. Raises NodesDiffer if one is gone."""
        for name, link in self._links.items():
            try:
                link.send(message, files)
            except LinkLost:
                raise self._gone(name) from None

    def hear(self) -> dict[str, tuple[dict[str, Any], dict[str, bytes]]]:
        """Wait for a message of each node; return messages and files by name.

        Raises:
            NodesDiffer: one of them does not start, or is gone.
        """
        heard = {}
        for name, link in self._links.items():
            try:
                message, files = link.receive()
                while "waiting" in message:
                    print(f"sgl_ragged: {message['waiting']}", file=sys.stderr, flush=True)
                    message, files = link.receive()
            except (LinkLost, NoNode):
                raise self._gone(name) from None
            if "refused" in message:
                raise NodesDiffer(str(message["refused"]))
            heard[name] = message, files
        return heard

    def refuse(self, why: str) -> None:
        """Tell the nodes that are still there why nothing is served, and disconnect."""
        for link in self._links.values():
            with contextlib.suppress(LinkLost):
                link.send({"refused": why})
        self.close()

    def close(self) -> None:
        """Disconnect; the other nodes notice."""
        for link in self._links.values():
            link.close()

    def watch(self) -> None:
        """End this process, and all that it has started, when another node ends."""
        for link in self._links.values():
            os.register_at_fork(after_in_child=link.leave_to_parent)
        threading.Thread(target=self._end_with_others, name="sgl_ragged nodes", daemon=True).start()

    def _end_with_others(self) -> None:
        with selectors.DefaultSelector() as selector:
            for name, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, name)
            (key, _), *_ = selector.select()
        end_process(f"{key.data} has ended, and a model over several nodes needs all of them; so does {self.own.name}")

    def _gone(self, name: str) -> NodesDiffer:
        return NodesDiffer(f"{name} has ended before {self.own.name} could start; start all nodes again")


def end_process(why: str) -> None:
    """End this process and all that it has started at once, with one line, before workers log timeouts."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    print(f"sgl_ragged: {why}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def meeting(own: Introduction, address: tuple[str, int], count: int, within_s: float) -> Iterator[Nodes]:
    """Meet the other nodes; disconnect with a reason if the block raises, watch them if it does not.

    Args:
        address: host and port of --dist-init-addr.
        count: nodes, this one among them.
        within_s: seconds to wait for the other nodes.

    Raises:
        RaggedConfigError: they cannot meet, or differ; the line is the same on all of them.
    """
    nodes = Nodes(own, await_nodes(own, address, count, within_s) if own.number == 0 else {})
    if own.number:
        nodes = Nodes(own, join_first(own, address, within_s))
    try:
        yield nodes
    except NodesDiffer as error:
        nodes.refuse(str(error))
        raise
    except RaggedConfigError as error:
        nodes.refuse(f"{own.name} does not start: {error}")
        raise
    except BaseException:
        nodes.close()
        raise
    nodes.watch()


def await_nodes(own: Introduction, address: tuple[str, int], count: int, within_s: float) -> dict[str, Link]:
    """Return the first node's links to all other nodes by name, once all have come and none differs.

    Raises:
        RaggedConfigError: the address cannot be used, nodes differ, or do not come in time.
    """
    shown, deadline = f"{address[0]}:{address[1]}", time.monotonic() + within_s
    found: dict[int, tuple[Introduction, Link]] = {}
    try:
        with _listen(address) as listener:
            while len(found) < count - 1:
                missing = sorted(set(range(1, count)) - set(found))
                print(f"sgl_ragged: waiting for nodes {missing} at {shown}", file=sys.stderr, flush=True)
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, peer = listener.accept()
                except TimeoutError:
                    raise NodesDiffer(
                        f"nodes {missing} have not come to {own.name} at {shown} within {within_s:.0f} s; start them "
                        f"with this --dist-init-addr, or look for what is between them"
                    ) from None
                connection.setblocking(True)
                link = Link(connection)
                try:
                    message, _ = link.receive(_INTRODUCED_WITHIN_S)
                    other = Introduction.from_message(message)
                except (LinkLost, NoNode):
                    link.close()
                    logger.warning("%s has come to %s and is no node with --kv-pool ragged", peer[0], shown)
                    continue
                taken = found.get(other.number)
                if other.number not in range(1, count) or taken is not None:
                    why = f"--node-rank must be below {count}" if taken is None else f"{taken[0].name} has come already"
                    line = f"{other.name} cannot join {own.name}: {why}; give each node a --node-rank of its own"
                else:
                    line = difference(own, other) or ""
                found[other.number] = other, link
                if line:
                    raise NodesDiffer(line)
                if None in (own.facts.get("weights"), other.facts.get("weights")):
                    logger.warning("weights are not on all of %s and %s yet, and not compared", own.name, other.name)
    except BaseException as error:
        for _, link in found.values():
            if isinstance(error, NodesDiffer):
                with contextlib.suppress(LinkLost):
                    link.send({"refused": str(error)})
            link.close()
        raise
    links = {other.name: link for _, (other, link) in sorted(found.items())}
    Nodes(own, links).tell({"node": asdict(own)})
    return links


def join_first(own: Introduction, address: tuple[str, int], within_s: float) -> dict[str, Link]:
    """Return another node's link to the first, by its name, once all have come and none differs.

    Raises:
        RaggedConfigError: the first node cannot be reached, is none, or finds a difference.
    """
    shown = f"{address[0]}:{address[1]}"
    link = _connect(own, address, within_s)
    try:
        link.send({"node": asdict(own)})
        message, _ = link.receive(within_s)
        if "refused" in message:
            raise NodesDiffer(str(message["refused"]))
        first = Introduction.from_message(message)
    except (LinkLost, NoNode):
        link.close()
        raise NodesDiffer(
            f"what answers {own.name} at {shown} is no first node with --kv-pool ragged, or has ended; start that one "
            f"with --kv-pool ragged and --node-rank 0"
        ) from None
    print(f"sgl_ragged: {own.name} waits for the plan of {first.name}", file=sys.stderr, flush=True)
    return {first.name: link}


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        shown = f"--dist-init-addr {address[0]}:{address[1]}"
        if error.errno == errno.EADDRINUSE:
            raise RaggedConfigError(f"{shown} is in use on the first node; give all nodes another port") from None
        raise RaggedConfigError(
            f"{shown} is no address of the first node, this machine ({error.strerror}); give all nodes one at which it "
            f"can be reached"
        ) from None


def _connect(own: Introduction, address: tuple[str, int], within_s: float) -> Link:
    deadline, waiting = time.monotonic() + within_s, False
    while True:
        try:
            connection = socket.create_connection(address, timeout=_INTRODUCED_WITHIN_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodesDiffer(
                    f"{own.name} cannot reach the first node at {address[0]}:{address[1]} within {within_s:.0f} s "
                    f"({error.strerror or error}); start it, or look for what is between them"
                ) from None
            if not waiting:
                waiting = True
                shown = f"{address[0]}:{address[1]}"
                print(f"sgl_ragged: {own.name} waits for the first node at {shown}", file=sys.stderr, flush=True)
            time.sleep(_RETRY_S)
            continue
        if connection.getsockname() == connection.getpeername():
            # Nobody listens, and the system gave this end the port that it was to reach.
            connection.close()
            continue
        connection.settimeout(None)
        return Link(connection)

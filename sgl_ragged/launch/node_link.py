"""A connection between the launchers of two nodes, for JSON and the bytes of files.

A message is the length of its JSON in eight bytes, the JSON, and the files that it lists. Nothing of it is executed,
and a peer that sends anything else is no node.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LENGTH = struct.Struct(">Q")

_MOST_JSON, _MOST_FILE = 2**24, 2**33
"""Bytes of a message's JSON, and of one of its files, at most."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A node that has lost its power or its network sends nothing; 25 seconds later it counts as gone."""


class LinkLost(Exception):
    """The other end is gone."""


class NoNode(Exception):
    """The other end is something else than a node."""


class Link:
    """One end of a connection.

    Args:
        connection: connected; it is the link's from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Send a message.

        Args:
            message: values that JSON has. files: contents by name.

        Raises:
            LinkLost: the other end is gone.
        """
        sizes = {name: len(content) for name, content in files.items()}
        head = json.dumps({"message": dict(message), "files": sizes}).encode()
        try:
            self.socket.sendall(b"".join([_LENGTH.pack(len(head)), head, *files.values()]))
        except OSError as error:
            raise LinkLost(str(error)) from None

    def receive(self, within_s: float | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Wait for a message; returns it and its files.

        Args:
            within_s: seconds to wait for each part of it; None for any time.

        Raises:
            LinkLost: the other end is gone.
            NoNode: it sent something else, or nothing in time.
        """
        self.socket.settimeout(within_s)
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > _MOST_JSON:
                raise NoNode("no message of a node")
            head = json.loads(self._read(length))
            message, sizes = head["message"], head["files"]
            if not isinstance(message, dict) or not all(0 <= size <= _MOST_FILE for size in sizes.values()):
                raise NoNode("no message of a node")
            return message, {name: self._read(size) for name, size in sizes.items()}
        except TimeoutError:
            raise NoNode(f"nothing within {within_s} s") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise NoNode("no message of a node") from None
        except OSError as error:
            raise LinkLost(str(error)) from None
        finally:
            with contextlib.suppress(OSError):
                self.socket.settimeout(None)

    def leave_to_parent(self) -> None:
        """Close this process's copy of the socket after a fork, so that the connection ends with the parent."""
        self.socket.close()

    def close(self) -> None:
        """Close this end; the other node notices."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self, length: int) -> bytes:
        parts, missing = [], length
        while missing:
            part = self.socket.recv(min(missing, 2**20))
            if not part:
                raise LinkLost("closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

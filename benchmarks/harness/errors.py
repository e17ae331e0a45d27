"""What ends a benchmark, and what ends a single point of it."""

from __future__ import annotations


class SettingsError(ValueError):
    """What was asked for cannot be run. One line that says why and what to do."""


class ServerLost(RuntimeError):
    """The server does not answer any more: the benchmark stops."""


class PointFailed(RuntimeError):
    """A request of this point was not served as asked: the point is rejected, the benchmark goes on."""

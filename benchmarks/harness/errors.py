"""The errors that end a benchmark, or a single point of one."""

from __future__ import annotations

import re


class BenchmarkError(Exception):
    """Ends a benchmark. The message is one line that says why and what to do."""


class SettingsError(BenchmarkError):
    """The settings cannot be run as they are."""


class ServerFailed(BenchmarkError):
    """A server ended or did not become ready. Unlike that of the others, its message is the end of the server's log."""

    @property
    def reason(self) -> str:
        """The last line of its log that names an error, else the last one: SGLang logs how it ends after why."""
        lines = [line for line in str(self).splitlines() if line.strip()]
        return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception): ", line)), lines[-1])


class ServerLost(BenchmarkError):
    """The server does not answer any more."""


class PointFailed(BenchmarkError):
    """The server refused a request or broke it off. A benchmark of several points rejects this one and goes on."""

"""What commands share that ask one server after the other: progress in the terminal, and errors that name a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError


def bars(console: Console) -> Progress:
    """Progress bars with counts and elapsed times, to be entered by a `with` block."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextlib.contextmanager
def naming(name: str, log: Path, finished: str = "") -> Iterator[None]:
    """Around a server's start and what it is asked: errors say which one it was and where its log is.

    `log`: of several servers a pattern. `finished`: what a lost server leaves, where the same command continues.

    Raises:
        ServerLost: it went away.
        SettingsError: it did not start, or refused a request.
    """
    try:
        yield
    except ServerLost as error:
        left = f": {finished}, and the same command continues from there" if finished else ""
        # Servers that somebody else runs write no log here.
        where = f"; its log is {log}" if any(log.parent.glob(log.name)) else ""
        raise ServerLost(f"the server of {name} is gone ({error}){left}{where}") from None
    except PointFailed as error:
        raise SettingsError(f"{name}: {error}; the log of its server is {log}") from None
    except ServerFailed as error:
        raise SettingsError(f"the server of {name} did not start, its log is {log}: {error.reason}") from None

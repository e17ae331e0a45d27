"""The files of a suite by task, and the choice of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.accuracy.session import SuiteError

Files = TypeVar("Files")


def candidates(data: Path) -> list[Path]:
    """`data` itself if it is a file, else all files below it, sorted. Raises SuiteError where there is no such path."""
    if data.is_file():
        return [data]
    if not data.exists():
        raise SuiteError(f"{data}: no such file or folder")
    return sorted(path for path in data.rglob("*") if path.is_file())


def chosen(found: Mapping[str, Files], tasks: Sequence[str] | None) -> dict[str, Files]:
    """What was found for these tasks, all without any; a name may leave out what comes before its last slash.

    Raises:
        SuiteError: nothing was found for one of them.
    """
    if not tasks:
        return dict(found)
    unknown = [task for task in tasks if not any(_is_called(name, (task,)) for name in found)]
    if unknown:
        raise SuiteError(f"no task {', '.join(unknown)} in this data: it holds {', '.join(found)}")
    return {name: files for name, files in found.items() if _is_called(name, tasks)}


def _is_called(name: str, tasks: Iterable[str]) -> bool:
    return any(task in (name, name.rpartition("/")[2]) for task in tasks)

"""Result files."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader, or a run that is killed, sees the old or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)

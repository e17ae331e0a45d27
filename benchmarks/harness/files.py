"""Files and folders that benchmarks write."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.errors import SettingsError


def write_whole(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader, or a run that is killed, sees the old or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def check_new_folder(folder: Path) -> None:
    """Raises SettingsError where the folder holds something, or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} is not empty")

"""Results in one JSON file that grows entry by entry, and that a later run with the same settings continues."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from rich.console import Console

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import write_whole
from benchmarks.harness.rows import Rows


class ResultFile(ABC):
    """Settings that all entries share, and the entries, which subclasses hold.

    On disk: {"settings": {...}, "about": {...}, ...}, where the rest is what `entries` gives. `about` is for readers.
    """

    benchmark: ClassVar[str]
    """Module whose results these are, for messages."""

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        """A file without entries; it is not written yet."""
        self.path, self.settings, self.about = path, settings, about

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> Self:
        """The file with the entries that it holds already, or a new one, which is not written yet.

        Args:
            settings: what decides whether entries may stand together. Settings that the file does not hold are not
                compared: files from before a setting was recorded lack it.
            about: of a new file.

        Raises:
            SettingsError: it holds entries of other settings, or is no file of this benchmark.
        """
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingsError(f"--output {path}: give a file in a folder that exists")
        before = cls.load(path) if path.exists() else None
        if before is None or not before.known:
            return cls(path, settings, about)
        if changed := differences(before.settings, settings, recorded_only=True):
            raise SettingsError(f"{path} holds results of other settings ({changed}): choose another --output")
        return before

    @classmethod
    def load(cls, path: Path) -> Self:
        """A file to read from. Raises SettingsError when it is none of this benchmark's."""
        try:
            return cls.from_json(path, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SettingsError(f"{path} cannot be read as results of {cls.benchmark} ({reason})") from None

    @classmethod
    def from_json(cls, path: Path, document: Any) -> Self:
        """Raises ValueError, KeyError, TypeError or AttributeError when the document is none of this benchmark's."""
        found = cls(path, document["settings"], document.get("about", {}))
        found.read_entries(document)
        return found

    @property
    @abstractmethod
    def known(self) -> Collection[Any]:
        """Keys of the entries."""

    @abstractmethod
    def read_entries(self, document: dict[str, Any]) -> None:
        """Take the entries from the document, to which `entries` added them."""

    @abstractmethod
    def entries(self) -> dict[str, Any]:
        """What the document holds beside settings and about, as plain values."""

    def write(self) -> None:
        """Write the file as a whole; it is on disk when this returns."""
        write_whole(self.path, self.text())

    def text(self) -> str:
        document = {"settings": self.settings, "about": self.about, **self.entries()}
        return json.dumps(document, indent=1) + "\n"

    def show(self, tables: Sequence[Rows], console: Console, *, as_json: bool) -> None:
        """Print the tables to the console, or what the file holds to standard output."""
        if as_json:
            print(self.text(), end="")
        else:
            for rows in tables:
                rows.show(console)


def differences(there: Mapping[str, Any], here: Mapping[str, Any], *, recorded_only: bool = False) -> str:
    """What differs between settings, as 'limit: there 8, here 16; machine.torch: ...'; empty where nothing does.

    `recorded_only`: settings that `there` lacks are not compared.
    """
    before, now = _flat(there), _flat(here)
    names = before if recorded_only else {*before, *now}
    changed = sorted(name for name in names if before.get(name) != now.get(name))
    return "; ".join(f"{name}: there {before.get(name)}, here {now.get(name)}" for name in changed)


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their path: {"machine": {"torch": "2"}} is {"machine.torch": "2"}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found

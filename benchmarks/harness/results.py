"""The store of results: one JSON file that grows entry by entry, and that the same command continues."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.harness.command import provenance
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import write_whole
from benchmarks.harness.table import Table

Kind = TypeVar("Kind")


@dataclass
class Results:
    """Entries of one benchmark by name, and the settings that they share.

    On disk: {"benchmark": NAME, "settings": {...}, "about": {...}, "entries": {NAME: VALUE, ...}}.

    Attributes:
        settings: decide whether entries may stand in one file.
        about: date and command of the first run, for readers.
        entries: plain values, as JSON gives them back.
    """

    path: Path
    benchmark: str
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, benchmark: str, settings: Mapping[str, Any]) -> Results:
        """Return the file with its entries, or a new one, which is not written yet.

        Raises:
            SettingsError: the file holds entries of other settings, or is not a file of this benchmark. Settings that
                the file does not hold are not compared: files from before a setting was recorded lack it.
        """
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingsError(f"--output {path}: give a file in a folder that exists")
        plain = _plain(settings)
        before = cls.load(path, benchmark) if path.exists() else None
        if before is None or not before.entries:
            return cls(path, benchmark, plain, provenance(benchmark.partition(".")[0]))
        if changed := differences(before.settings, plain):
            raise SettingsError(f"{path} holds results of other settings ({changed}): choose another --output")
        return before

    @classmethod
    def load(cls, path: Path, benchmark: str) -> Results:
        """Read a file. Raises SettingsError if it is not a file of this benchmark."""
        try:
            document = json.loads(path.read_text())
            if document["benchmark"] != benchmark:
                raise ValueError(f"of {document['benchmark']}")
            return cls(path, benchmark, dict(document["settings"]), dict(document["about"]), dict(document["entries"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SettingsError(f"{path} cannot be read as results of {benchmark} ({reason})") from None

    def add(self, name: str, entry: Any) -> None:
        """Keep an entry, a dataclass or plain values; it is on disk when this returns."""
        self.entries[name] = _plain(entry)
        self.write()

    def as_kind(self, kind: type[Kind]) -> dict[str, Kind]:
        """Entries as instances of a dataclass, by name. Raises SettingsError if an entry has other fields."""
        try:
            return {name: kind(**entry) for name, entry in self.entries.items()}
        except TypeError as error:
            raise SettingsError(f"{self.path} cannot be read as results of {self.benchmark} ({error})") from None

    def write(self) -> None:
        """Write the file as a whole; it is on disk when this returns."""
        write_whole(self.path, self.text())

    def text(self) -> str:
        """Content of the file, with one line for each entry."""
        names = ("benchmark", "settings", "about")
        head = "".join(f' "{name}": {json.dumps(getattr(self, name))},\n' for name in names)
        entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.entries.items())
        return f'{{\n{head} "entries": {{\n{entries}\n }}\n}}\n'

    def show(self, tables: Sequence[Table], console: Console, *, as_json: bool) -> None:
        """Print the tables to the console, or the content of the file to standard output."""
        if as_json:
            print(self.text(), end="")
            return
        for table in tables:
            table.show(console)


def _plain(value: Any) -> Any:
    """Convert to what JSON gives back: dataclasses to dicts, tuples to lists."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe recorded settings that differ: 'limit: there 8, here 16; machine.torch: ...'; empty if none does."""
    before, now = _flat(there), _flat(here)
    changed = sorted(name for name in before if before[name] != now.get(name))
    return "; ".join(f"{name}: there {before[name]}, here {now.get(name)}" for name in changed)


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Name nested settings by their path: {"machine": {"torch": "2"}} is {"machine.torch": "2"}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found

"""The file of a sweep: settings, what became of the sessions, and the cells of all servers that are finished."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.asking import AnsweredQuestion
from benchmarks.accuracy.cell import Cell, Key
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import write_whole


@dataclass(frozen=True)
class Prompts:
    """`max_length`: tokens of the longest prompt that was let through; `cut`: sessions that lost their middle."""

    sessions: int
    questions: int
    cut: int
    max_length: int


class Results:
    """The file, and what it holds. `prompts` is None until the first server has said what it takes."""

    def __init__(
        self, path: Path, settings: dict[str, Any], about: dict[str, Any], prompts: Prompts | None, cells: list[Cell]
    ) -> None:
        self.path, self.settings, self.about, self.prompts, self.cells = path, settings, about, prompts, cells

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> Results:
        """The file with the cells that it holds already, or a new one, which is not written yet.

        Args:
            settings: what decides whether cells may stand together. What a file does not say is not compared: those
                from before a setting was recorded lack it.
            about: for readers.

        Raises:
            SettingsError: it holds cells of other settings, or is no file of this benchmark.
        """
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingsError(f"--output {path}: give a file in a folder that exists")
        if not path.exists():
            return cls(path, settings, about, None, [])
        before = cls.load(path)
        if not before.cells:
            return cls(path, settings, about, None, [])
        if changed := _changes(before.settings, settings):
            raise SettingsError(f"{path} holds cells of other settings ({changed}): choose another --output")
        return before

    @classmethod
    def load(cls, path: Path) -> Results:
        """A file to read from. Raises SettingsError when it is none of this benchmark's."""
        try:
            return cls.from_json(path, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SettingsError(f"{path} cannot be read as results of benchmarks.accuracy ({reason})") from None

    @classmethod
    def from_json(cls, path: Path, document: Any) -> Results:
        prompts = document.get("prompts")
        cells = [Cell(**cell) for cell in document["cells"]]
        settings, about = document["settings"], document.get("about", {})
        return cls(path, dict(settings), about, Prompts(**prompts) if prompts else None, cells)

    @property
    def known(self) -> set[Key]:
        return {cell.key for cell in self.cells}

    def check_profile(self, key: Key, digest: Callable[[], str | None]) -> None:
        """Raises SettingsError when the cells of a server were measured with another profile of that name."""
        recorded = {cell.profile for cell in self.cells if cell.key == key} - {None}
        if recorded and recorded != {now := digest()}:
            there = ", ".join(sorted(str(one) for one in recorded))
            raise SettingsError(
                f"{self.path} holds cells of {key} with the profile {there}, and that is {now} now: choose another "
                "--output"
            )

    def add(self, cells: Sequence[Cell], asked: Sequence[AnsweredQuestion]) -> None:
        """Keep a server's cells, and its answers in the file beside; both are on disk when this returns."""
        self.cells += cells
        key = dataclasses.asdict(cells[0].key)
        with self.requests.open("a") as file:
            file.writelines(json.dumps(key | dataclasses.asdict(one)) + "\n" for one in asked)
        self.write()

    @property
    def requests(self) -> Path:
        """One line for each question that was asked; of a server that was run twice, the later lines count."""
        return self.path.with_suffix(".requests.jsonl")

    def write(self) -> None:
        write_whole(self.path, self.text())

    def text(self) -> str:
        document = {
            "settings": self.settings,
            "about": self.about,
            "prompts": dataclasses.asdict(self.prompts) if self.prompts else None,
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
        }
        return json.dumps(document, indent=1) + "\n"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """'limit: there 8, here 16; ...'; empty where nothing differs."""
    there, here = _flat(before), _flat(now)
    names = sorted(name for name in there if there[name] != here.get(name))
    return "; ".join(f"{name}: there {there[name]}, here {here.get(name)}" for name in names)


def _flat(settings: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found

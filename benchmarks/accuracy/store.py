"""The file of a sweep: settings, how sessions were cut, and the cells of all servers that are finished."""

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
from benchmarks.harness.result_file import ResultFile


@dataclass(frozen=True)
class Prompts:
    """`max_length`: tokens of the longest prompt that was let through; `cut`: sessions that lost their middle."""

    sessions: int
    questions: int
    cut: int
    max_length: int


class Results(ResultFile):
    """The file, and what it holds. `prompts` is None until the first server has said what it takes."""

    benchmark = "benchmarks.accuracy"

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        super().__init__(path, settings, about)
        self.prompts: Prompts | None = None
        self.cells: list[Cell] = []

    def read_entries(self, document: dict[str, Any]) -> None:
        # The first files have no prompts.
        if prompts := document.get("prompts"):
            self.prompts = Prompts(**prompts)
        self.cells = [Cell(**cell) for cell in document["cells"]]

    def entries(self) -> dict[str, Any]:
        return {
            "prompts": dataclasses.asdict(self.prompts) if self.prompts else None,
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
        }

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

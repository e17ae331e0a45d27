"""Records of JSON lines and of Parquet files, which know where they come from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.packages import imported
from benchmarks.accuracy.session import SuiteError

AGAIN = "prepare or download the file again"
_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Record:
    """One record of a file, or a part of one. `where` names file and line for errors."""

    where: str
    fields: dict[str, Any]

    def has(self, name: str) -> bool:
        """Whether the field is there; Parquet stores null where a record has none."""
        return self.fields.get(name) is not None

    def wrong(self, what: str) -> SuiteError:
        """An error about this record, to be raised."""
        return SuiteError(f"{self.where}: {what}; {AGAIN}")

    def text(self, name: str) -> str:
        """A field that is a string. Raises SuiteError when it is missing, empty or something else."""
        value = self._value(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(f'"{name}" must be a string that is not empty')
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list of strings. Raises SuiteError when it, or any string, is missing or empty."""
        value = self._value(name)
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise self.wrong(f'"{name}" must be a list of strings, neither it nor they empty')
        return tuple(value)

    def text_or_texts(self, name: str) -> tuple[str, ...]:
        """A field that is a string or a list of them, as a tuple. Raises SuiteError."""
        return self.texts(name) if isinstance(self._value(name), list) else (self.text(name),)

    def number(self, name: str) -> int | float:
        """A field that is a number. Raises SuiteError."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(f'"{name}" must be a number')
        return value

    def parts(self, name: str, called: str) -> tuple[Record, ...]:
        """A field that is a list of objects, each `called` so in errors, from 1 on. Raises SuiteError."""
        value = self._value(name)
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise self.wrong(f'"{name}" must be a list of objects that is not empty')
        return tuple(Record(f"{self.where}, {called} {number}", part) for number, part in enumerate(value, start=1))

    def _value(self, name: str) -> Any:
        if not self.has(name):
            raise self.wrong(f'"{name}" is missing')
        return self.fields[name]


def check_limit(limit: int | None) -> None:
    """Raises SuiteError when a limit leaves no record."""
    if limit is not None and limit < 1:
        raise SuiteError(f"a limit of {limit} leaves nothing to ask: it must be at least 1")


def read(paths: Sequence[Path], limit: int | None = None) -> list[Record]:
    """The first `limit` records of these files together, all without one.

    Raises:
        SuiteError: a file cannot be read, has no record, or one that is no object.
    """
    return list(itertools.islice(itertools.chain.from_iterable(_records(path) for path in paths), limit))


def _records(path: Path) -> Iterator[Record]:
    found = False
    try:
        for record in _rows(path) if path.suffix == ".parquet" else _lines(path):
            found = True
            yield record
    except OSError as error:
        raise SuiteError(f"{path} cannot be read ({error.strerror or error}): check the path and its rights") from None
    if not found:
        raise SuiteError(f"{path} is empty: {AGAIN}")


def _lines(path: Path) -> Iterator[Record]:
    # Read as bytes: in text mode other line breaks than \n, which JSON allows within strings, would end a line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise SuiteError(f"{where}: not JSON ({error}); {AGAIN}") from None
            if not isinstance(fields, dict):
                raise SuiteError(f"{where}: not a JSON object; {AGAIN}")
            yield Record(where, fields)


def _rows(path: Path) -> Iterator[Record]:
    pyarrow, parquet = imported("pyarrow"), imported("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, record {number}", fields)
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise SuiteError(f"{path}, after record {number}: not Parquet ({reason}); {AGAIN}") from None

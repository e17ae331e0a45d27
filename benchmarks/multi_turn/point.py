"""One point of the benchmark: a pool, a number of clients, a repetition, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.results import Results
from benchmarks.multi_turn.client import Answer
from benchmarks.multi_turn.gauges import Sample


@dataclass(frozen=True)
class Key:
    """Which point it is."""

    pool: str
    clients: int
    repeat: int

    def __str__(self) -> str:
        return f"{self.pool}, {self.clients} clients, run {self.repeat + 1}"


@dataclass(frozen=True)
class Point:
    """A finished point.

    Attributes:
        rejected: why it must not be used, None if it may be.
        date: when it began, ISO 8601 in UTC.
        virtual_tokens, kv_bytes: size of the pool on one rank, 0 if the server never reported it.
        start_up: the plugin's start-up line.
        rate_share, duration_s: as in `driver.Run`.
    """

    key: Key
    rejected: str | None
    date: str
    virtual_tokens: int
    kv_bytes: int
    start_up: str
    rate_share: float
    duration_s: float
    answers: tuple[Answer, ...]
    samples: tuple[Sample, ...]


def points(results: Results) -> list[Point]:
    """Points of a file, in the order in which they were measured. Raises SettingsError if an entry is not a point."""
    try:
        return [_point(one) for one in results.entries.values()]
    except (TypeError, KeyError) as error:
        raise SettingsError(f"{results.path} cannot be read as results of multi_turn ({error})") from None


def _point(values: dict[str, Any]) -> Point:
    answers = tuple(Answer(**one | {"itl_ms": tuple(one["itl_ms"])}) for one in values["answers"])
    samples = tuple(Sample(**one) for one in values["samples"])
    return Point(**values | {"key": Key(**values["key"]), "answers": answers, "samples": samples})

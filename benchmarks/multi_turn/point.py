"""One point of the benchmark: a pool, a number of clients, a repetition, and what was measured there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal point back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Point:
        """Raises TypeError, KeyError or ValueError when the values are not a point's."""
        if set(values) != {field.name for field in fields(cls)}:
            raise ValueError("not the fields of a point")
        answers = tuple(Answer(**{**one, "itl_ms": tuple(one["itl_ms"])}) for one in values["answers"])
        samples = tuple(Sample(**one) for one in values["samples"])
        return cls(**{**values, "key": Key(**values["key"]), "answers": answers, "samples": samples})

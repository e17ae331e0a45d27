"""The result file: visits and servers of the stages that are finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import ResultFile
from benchmarks.multi_turn.returning.visit import Visit


@dataclass(frozen=True)
class Held:
    """What a server has: bytes of KV on the device and of its host tier (0: none), tokens that fit each.

    `restored`: segments by tier that a ragged pool counted (`sglang:ragged_restored_segments_total`).
    """

    stage: str
    variant: str
    device_bytes: int
    host_bytes: int
    device_tokens: int
    host_tokens: int
    restored: dict[str, int]


class Results(ResultFile):
    """The file, and what it holds."""

    benchmark = "benchmarks.multi_turn --shape return"

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        super().__init__(path, settings, about)
        self.stages: list[str] = []
        self.servers: list[Held] = []
        self.visits: list[Visit] = []

    def read_entries(self, document: dict[str, Any]) -> None:
        self.stages = list(document["stages"])
        self.servers = [Held(**one) for one in document["servers"]]
        self.visits = [Visit(**one) for one in document["visits"]]

    def entries(self) -> dict[str, Any]:
        return {
            "stages": self.stages,
            "servers": [dataclasses.asdict(one) for one in self.servers],
            "visits": [dataclasses.asdict(one) for one in self.visits],
        }

    @property
    def known(self) -> Collection[str]:
        return self.stages

    def add(self, stage: str, servers: Sequence[Held], visits: Sequence[Visit]) -> None:
        """Keep a finished stage."""
        self.stages.append(stage)
        self.servers += servers
        self.visits += visits

    def variants(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(one.variant for one in self.visits))

    def of(self, variant: str, cell: str) -> list[Visit]:
        """Visits that count: those that were found where the cell says."""
        return [one for one in self.visits if (one.variant, one.cell) == (variant, cell) and one.in_place]

    def ttft_s(self, variant: str, cell: str) -> list[float]:
        return [one.ttft_s for one in self.of(variant, cell)]

    def strays(self) -> list[Visit]:
        """Visits that do not count."""
        return [one for one in self.visits if not one.in_place]

    def hit_rate(self, variant: str, cell: str) -> float:
        """Cached / held tokens."""
        found = self.of(variant, cell)
        return sum(one.cached for one in found) / sum(one.held for one in found)

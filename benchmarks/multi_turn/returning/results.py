"""Visits and servers of the stages that are finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness.results import Results
from benchmarks.multi_turn.returning.visit import Visit


@dataclass(frozen=True)
class Held:
    """Capacity of a server.

    Attributes:
        device_bytes, host_bytes: KV on the device and of its host tier, 0 without one.
        device_tokens, host_tokens: tokens that fit into them.
        restored: segments by tier that a ragged pool counted (`sglang:ragged_restored_segments_total`).
    """

    stage: str
    variant: str
    device_bytes: int
    host_bytes: int
    device_tokens: int
    host_tokens: int
    restored: dict[str, int]


@dataclass(frozen=True)
class Returns:
    """Visits and servers of all stages."""

    servers: list[Held] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)

    @classmethod
    def of(cls, results: Results) -> Returns:
        """Read the entries of a file, {"servers": [...], "visits": [...]} for each stage."""
        stages = list(results.entries.values())
        servers = [Held(**one) for stage in stages for one in stage["servers"]]
        return cls(servers, [Visit(**one) for stage in stages for one in stage["visits"]])

    def variants(self) -> list[str]:
        """Names of variants, in the order in which they were measured."""
        return list(dict.fromkeys(one.variant for one in self.visits))

    def counted(self, variant: str, cell: str) -> list[Visit]:
        """Visits that were found on the tier that the cell names."""
        return [one for one in self.visits if (one.variant, one.cell) == (variant, cell) and one.in_place]

    def ttft_s(self, variant: str, cell: str) -> list[float]:
        return [one.ttft_s for one in self.counted(variant, cell)]

    def strays(self) -> list[Visit]:
        """Visits that do not count."""
        return [one for one in self.visits if not one.in_place]

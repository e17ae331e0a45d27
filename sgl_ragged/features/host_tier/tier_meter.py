"""Segments and bytes that came back from the tiers under the device, counted on the host."""

from __future__ import annotations

HOST, STORAGE, RECOMPUTED = "host", "storage", "recomputed"
"""Ways in which a segment comes back: copied from the host to the pool, read from storage to the host before that,
or computed again though the host has it."""


class TierMeter:
    """Segments and bytes by the way in which they came back.

    Args:
        segment: tokens per segment.
        row_bytes: bytes of a segment in the tier.
    """

    def __init__(self, segment: int, row_bytes: int) -> None:
        self._segment = segment
        self._row_bytes = row_bytes
        self.segments = dict.fromkeys((HOST, STORAGE, RECOMPUTED), 0)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that were moved."""
        return {way: self.segments[way] * self._row_bytes for way in (HOST, STORAGE)}

    def count(self, way: str, tokens: int) -> None:
        """Count segments that came back."""
        self.segments[way] += tokens // self._segment

"""Settings of retrieval, decided once by the launcher. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.roles import HeadRoles
from sgl_ragged.mem_pool.layout import SlabLayout

RADIX_CACHE = "ragged_retrieval"
"""Name of the radix cache in SGLang's registry."""

ASKING_TOKENS = 32
"""Number of last tokens of a prompt that see an overlay chosen by their own attention."""

DELAY = 2
"""Decode steps between the request for an overlay and its use."""

CANDIDATES = 4
"""Tokens that a pivot names per token of an overlay, since satellites have kept some of them."""


_PLACE_BYTES = 2
"""Bytes of an int16: the row of an entry for a token of the segment."""

_COUNT_BYTES = 4
"""Bytes of an int32 and of a float32: rows in an overlay, log-sum-exp of a query."""


@dataclass(frozen=True)
class Retrieval:
    """Sizes and thresholds of retrieval.

    reservoir_bytes: host memory for rows that satellites dropped.
    overlay: most tokens in a satellite head's overlay.
    pivots: number of heads that watch.
    interval: tokens between two comparisons of attention with the last fetch.
    drift: overlap with the last fetch in [0, 1], below which rows are fetched again.
    """

    reservoir_bytes: int
    overlay: int
    pivots: int
    interval: int
    drift: float

    def __post_init__(self) -> None:
        for name, least in (("overlay", 1), ("pivots", 1), ("interval", DELAY + 1)):
            if getattr(self, name) < least:
                flag = "watch-interval" if name == "interval" else name
                raise RaggedConfigError(f"--ragged-{flag} {getattr(self, name)} must be at least {least}")
        if not 0 <= self.drift <= 1:
            raise RaggedConfigError(f"--ragged-drift {self.drift} is outside [0, 1]")

    def row_bytes(self, satellites: int, head_dim: int, q_per_kv: int, itemsize: int, query_itemsize: int) -> int:
        """Return device bytes of one request: overlays of its satellite heads, and recent queries of its pivots.

        Args:
            satellites: number of heads with a pivot. itemsize, query_itemsize: bytes per element of the cache, and
                of queries.
        """
        overlays = satellites * (2 * self.overlay * head_dim * itemsize + _COUNT_BYTES)
        return overlays + self.pivots * self.interval * q_per_kv * (head_dim * query_itemsize + _COUNT_BYTES)

    def entries(self, rank_entry_bytes: Sequence[int]) -> int:
        """Return the segments that the reservoir holds on each rank, equal on all ranks.

        Args:
            rank_entry_bytes: bytes of one segment on each rank, as `entry_bytes` counts them.

        Raises:
            RaggedConfigError: the memory is less than one segment needs.
        """
        size = sum(rank_entry_bytes)
        if self.reservoir_bytes < size:
            raise RaggedConfigError(
                f"--ragged-reservoir {self.reservoir_bytes} holds nothing: what is dropped of one segment takes {size} "
                f"bytes"
            )
        return self.reservoir_bytes // size

    def describe(self, roles: HeadRoles) -> str:
        """Return the part of the start-up line."""
        return (
            f"{len(roles.pivots)} pivots watch for {sum(map(len, roles.satellites))} heads, which can be given "
            f"{self.overlay} tokens each, from {self.reservoir_bytes} bytes of host memory"
        )

    @property
    def numbers(self) -> list[float]:
        """All settings as numbers, for digests."""
        return list(astuple(self))


def entry_rows(layout: SlabLayout, satellites: Sequence[Sequence[int]]) -> int:
    """Count the rows, a key and a value each, that satellites drop of a segment; satellites: heads by layer."""
    return sum(layout.segment - int(layout.totals[layer][head]) for layer, own in enumerate(satellites) for head in own)


def entry_bytes(layout: SlabLayout, satellites: Sequence[Sequence[int]], itemsize: int) -> int:
    """Return host bytes of one segment's entry in a reservoir: its rows, and the row of each token."""
    places = sum(map(len, satellites)) * layout.segment * _PLACE_BYTES
    return entry_rows(layout, satellites) * 2 * layout.head_dim * itemsize + places

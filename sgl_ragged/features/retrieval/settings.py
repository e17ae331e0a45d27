"""What retrieval is asked to do, decided once by the launcher. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.roles import HeadRoles
from sgl_ragged.mem_pool.layout import SlabLayout

RADIX_CACHE = "ragged_retrieval"
"""Name of the radix cache in SGLang's registry."""

ASKING_TOKENS = 32
"""The last tokens of a prompt, which see an overlay that their own attention asks for."""

DELAY = 2
"""Decode steps from when an overlay is asked for to when it is used, however long it takes."""

CANDIDATES = 4
"""How many tokens a pivot names for each token of an overlay: satellites have kept some of them."""


_PLACE_BYTES = 2
"""Of an int16: which row of an entry a token of the segment has."""

_COUNT_BYTES = 4
"""Of an int32 and a float32: how many rows of an overlay count, the log-sum-exp of a query."""


@dataclass(frozen=True)
class Retrieval:
    """reservoir_bytes: host memory for what satellites dropped. overlay: tokens that a satellite head is given.

    pivots: how many heads watch. interval: tokens between two questions whether attention has moved.
    drift: overlap of what is attended to now with what was fetched last, below which it has.
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
        """Device bytes of one request: the overlays of its satellite heads, and what its pivots have asked lately.

        Args:
            satellites: heads that somebody watches for. itemsize, query_itemsize: bytes per element of the cache, and
                of queries.
        """
        overlays = satellites * (2 * self.overlay * head_dim * itemsize + _COUNT_BYTES)
        return overlays + self.pivots * self.interval * q_per_kv * (head_dim * query_itemsize + _COUNT_BYTES)

    def entries(self, rank_entry_bytes: Sequence[int]) -> int:
        """How many segments the reservoir holds on each rank: on all of them equally many.

        Args:
            rank_entry_bytes: of one segment on each rank, as `entry_bytes` counts them.

        Raises:
            RaggedConfigError: not one.
        """
        size = sum(rank_entry_bytes)
        if self.reservoir_bytes < size:
            raise RaggedConfigError(
                f"--ragged-reservoir {self.reservoir_bytes} holds nothing: what is dropped of one segment takes {size} "
                f"bytes"
            )
        return self.reservoir_bytes // size

    def describe(self, roles: HeadRoles) -> str:
        """Part of the start-up line."""
        return (
            f"{len(roles.pivots)} pivots watch for {sum(map(len, roles.satellites))} heads, which can be given "
            f"{self.overlay} tokens each, from {self.reservoir_bytes} bytes of host memory"
        )

    @property
    def numbers(self) -> list[float]:
        """All of it, for digests."""
        return list(astuple(self))


def entry_rows(layout: SlabLayout, satellites: Sequence[Sequence[int]]) -> int:
    """Rows, a key and a value each, that the satellites drop of a segment; their head numbers by layer."""
    return sum(layout.segment - int(layout.totals[layer][head]) for layer, own in enumerate(satellites) for head in own)


def entry_bytes(layout: SlabLayout, satellites: Sequence[Sequence[int]], itemsize: int) -> int:
    """Host bytes of one segment's entry in a reservoir: its rows, and which row each of its tokens has."""
    places = sum(map(len, satellites)) * layout.segment * _PLACE_BYTES
    return entry_rows(layout, satellites) * 2 * layout.head_dim * itemsize + places

"""What retrieval is asked to do, decided once by the launcher. No torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from sgl_ragged.errors import RaggedConfigError

WINDOW = 32
"""The last tokens of a prompt, which see an overlay that their own attention asks for."""

DELAY = 2
"""Decode steps from when an overlay is asked for to when it is used, however long it takes."""

CANDIDATES = 4
"""How many tokens a pivot names for each token of an overlay: satellites have kept some of them."""


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

    @property
    def numbers(self) -> list[float]:
        """All of it, for digests."""
        return list(astuple(self))

"""How a KV budget in bytes is divided into slabs and tails (design section 5). Plain arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.layout import SlabLayout

MAX_TAIL_SHARE = 1 / 8
"""Unless the user asks for more running requests, tails take at most this share of the KV budget."""

MAX_ROWS = 2048
"""SGLang's own default number of request rows."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """'24GiB', '512M', '1e9', '1048576' to bytes; decimal suffixes k M G T, binary Ki Mi Gi Ti, optional B."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _SUFFIXES:
        raise RaggedConfigError(f"cannot read {text!r} as a number of bytes; write for example 24GiB, 512M or 1048576")
    try:
        size = int(float(match.group(1)) * _SUFFIXES[match.group(2)])
    except ValueError:
        raise RaggedConfigError(f"cannot read {text!r} as a number of bytes") from None
    if size <= 0:
        raise RaggedConfigError(f"{text!r} must be more than zero bytes")
    return size


@dataclass(frozen=True)
class PoolPlan:
    """What the pool allocates on one rank. Bytes are of this rank; tokens are virtual (uncompressed) tokens.

    `side_bytes`: what the scorer keeps beside each row's tail, counted as part of the tails.
    """

    layout: SlabLayout
    itemsize: int
    num_slots: int
    num_rows: int
    side_bytes: int = 0

    @property
    def slab_bytes(self) -> int:
        return self.layout.slab_bytes(self.itemsize)

    @property
    def row_bytes(self) -> int:
        """One request's tail and what the scorer keeps beside it."""
        return self.layout.tail_bytes(self.itemsize) + self.side_bytes

    @property
    def tails_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slab_bytes + self.tails_bytes

    @property
    def max_total_tokens(self) -> int:
        """Tokens that SGLang may allocate: slot 0 is its padding page and holds none."""
        return (self.num_slots - 1) * self.layout.segment

    @property
    def max_requests(self) -> int:
        """Requests that can run at once: row 0 is SGLang's padding row."""
        return self.num_rows - 1

    @property
    def full_tokens(self) -> int:
        """Tokens that an uncompressed cache holds in the same bytes."""
        return self.total_bytes // self.layout.full_bytes_per_token(self.itemsize)

    def describe(self) -> str:
        """The start-up line."""
        kept = self.layout.kept
        low, middle, high = int(kept.min()), _median(kept.ravel().tolist()), int(kept.max())
        gain = self.max_total_tokens / self.full_tokens
        return (
            f"kept per {self.layout.segment}-token segment min/median/max {low}/{middle:g}/{high} "
            f"(mean share {self.layout.mean_kept_share:.4f}), slab {self.slab_bytes} bytes, {self.num_slots} slots, "
            f"{self.max_total_tokens} virtual tokens, tails {self.tails_bytes} bytes for {self.max_requests} requests, "
            f"total {self.total_bytes} bytes; full KV would hold {self.full_tokens} tokens in them ({gain:.2f}x)"
        )


def plan_pool(
    layout: SlabLayout, itemsize: int, budget_bytes: int, max_requests: int | None, side_bytes: int = 0
) -> PoolPlan:
    """Divide a KV budget into tails and slabs.

    Args:
        layout: the slab layout of this rank.
        itemsize: bytes per element of the KV dtype.
        budget_bytes: everything the pool may allocate on this rank.
        max_requests: the user's --max-running-requests, or None to choose it so that tails take at most
            MAX_TAIL_SHARE of the budget (but at least one request).
        side_bytes: as in PoolPlan.

    Raises:
        RaggedConfigError: the budget does not hold the tails and one usable slab.
    """
    tail, slab = layout.tail_bytes(itemsize) + side_bytes, layout.slab_bytes(itemsize)
    if max_requests is None:
        requests = min(max(int(budget_bytes * MAX_TAIL_SHARE) // tail - 1, 1), MAX_ROWS)
    else:
        requests = max_requests
    num_rows = requests + 1
    num_slots = (budget_bytes - num_rows * tail) // slab
    if num_slots < 2:
        needed = num_rows * tail + 2 * slab
        raise RaggedConfigError(
            f"a KV budget of {budget_bytes} bytes is too small: {requests} running requests need {num_rows * tail} "
            f"bytes of tails and at least two slabs of {slab} bytes, together {needed}; give more memory "
            f"(--kv-bytes, --mem-fraction-static), fewer --max-running-requests or a shorter --ragged-segment"
        )
    return PoolPlan(
        layout=layout, itemsize=itemsize, num_slots=int(num_slots), num_rows=num_rows, side_bytes=side_bytes
    )


def _median(values: list[int]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

"""Tile shapes: how much of the work one CTA holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError

HEAD_DIMS = (16, 32, 64, 128, 256)
MOST_Q_PER_KV = 16


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys that a CTA works on, its warps, and the depth of its software pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def decode_tile(head_dim: int, itemsize: int) -> Tile:
    """The tile of the decode kernel; 16 query rows, the fewest that a tensor core takes.

    Args:
        itemsize: bytes per element of the KV dtype.
    """
    if itemsize == 4:
        return Tile(16, 32, 4, 3) if head_dim <= 128 else Tile(16, 16, 4, 3)
    return Tile(16, 64, 4, 3) if head_dim <= 128 else Tile(16, 32, 4, 3)


def extend_tile(head_dim: int, itemsize: int) -> Tile:
    """The tile of the extend kernel; query rows are (token, query head) pairs."""
    if itemsize == 4:
        return Tile(32, 32, 4, 2) if head_dim <= 128 else Tile(16, 16, 4, 2)
    return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 32, 4, 3)


def check_shape(head_dim: int, q_per_kv: int) -> None:
    """Raise RaggedConfigError for heads that the Triton kernels cannot take."""
    if head_dim not in HEAD_DIMS or not 1 <= q_per_kv <= MOST_Q_PER_KV:
        raise RaggedConfigError(
            f"the Triton kernels take head dimensions {', '.join(map(str, HEAD_DIMS))} and up to {MOST_Q_PER_KV} query "
            f"heads per KV head, not {head_dim} and {q_per_kv}; use --ragged-kernel torch"
        )

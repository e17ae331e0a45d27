"""Head dimensions in tiles. A tile is a power of two wide, a row in memory as wide as the head.

HEAD_DIM is everywhere that of rows; columns of a tile from there on are not read or written, and 0 in what was read.
Where the head dimension is a power of two, there are none, and no mask for them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def columns(head_dim: int) -> int:
    """Width of a tile: the next power of two.

    Triton's function for it is no longer one for kernels where SGLang has replaced it, as it does without a GPU.
    """
    return 1 << (head_dim - 1).bit_length()


@triton.jit
def cells(rows, HEAD_DIM: tl.constexpr):
    """The mask of a tile, where rows [ROWS] are those that exist: broadcasts to [ROWS, next power of 2]."""
    mask = rows[:, None]
    if columns(HEAD_DIM) > HEAD_DIM:
        mask = mask & (tl.arange(0, columns(HEAD_DIM)) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def cells_until(numbers, end, HEAD_DIM: tl.constexpr):
    """`cells` of the rows whose number is below `end`. In loops: one comparison in place of two spares registers."""
    if columns(HEAD_DIM) > HEAD_DIM:
        ends = tl.where(tl.arange(0, columns(HEAD_DIM)) < HEAD_DIM, end, 0)
        return numbers[:, None] < ends[None, :]
    else:
        return (numbers < end)[:, None]

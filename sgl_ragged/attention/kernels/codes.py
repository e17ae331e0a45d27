"""Keys and values in few bits, in kernels: as `mem_pool.quantise` defines them, bit for bit.

Rotations are sums and differences in a fixed order, divisions are rounded as the standard says, so that a row's codes
are the same wherever it is sealed. Tiles are padded (`dims`) by whole blocks of rotations: zeros stay zeros there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.dims import cells, columns
from sgl_ragged.mem_pool.quantise import rotation_block

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a number below 2^22 and taking it off again rounds half to even."""

_STEPS = tl.constexpr(8)
"""Of rotations at most: head dimensions up to 256."""

rotation_width = triton.constexpr_function(rotation_block)
"""Dimensions in each block of rotations."""


@triton.jit
def _mixed(x, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums and differences of dimensions that are WIDTH apart."""
    pairs = tl.reshape(x, [ROWS, COLUMNS // (2 * WIDTH), 2, WIDTH])
    one, other = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.permute(tl.join(one + other, one - other), (0, 1, 3, 2))
    return tl.reshape(both, [ROWS, COLUMNS])


@triton.jit
def rotated(x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A tile of rows in float32, times the Hadamard matrix of each block of dimensions; its own inverse."""
    x = x.to(tl.float32)
    for step in tl.static_range(_STEPS):
        if (1 << step) < rotation_width(HEAD_DIM):
            x = _mixed(x, 1 << step, ROWS, columns(HEAD_DIM))
    return x * (rotation_width(HEAD_DIM) ** -0.5)


@triton.jit
def quantised(x, BITS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Quantise a tile of rows, rotated, to whole numbers in float32 and scales in float16 [ROWS]."""
    MOST: tl.constexpr = 2 ** (BITS - 1) - 1
    x = rotated(x, ROWS, HEAD_DIM)
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.minimum(tl.maximum(tl.div_rn(largest, tl.full([ROWS], MOST, tl.float32)), 2.0**-24), 65504.0)
    undefined = tl.max((x != x).to(tl.int32), axis=1) > 0
    scale = tl.where(undefined, float("nan"), scale).to(tl.float16)
    wide = tl.broadcast_to(scale.to(tl.float32)[:, None], [ROWS, columns(HEAD_DIM)])
    codes = tl.minimum(tl.maximum(tl.div_rn(x, wide), -MOST), MOST)
    codes = tl.where(undefined[:, None], 0.0, codes)
    return (codes + _ROUND) - _ROUND, scale


@triton.jit
def halves(x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The first and the second half of each block of a tile's dimensions: two tiles of half the columns."""
    COLUMNS: tl.constexpr = columns(HEAD_DIM)
    BLOCK: tl.constexpr = rotation_width(HEAD_DIM)
    blocks = tl.reshape(x, [ROWS, COLUMNS // BLOCK, 2, BLOCK // 2])
    low, high = tl.split(tl.permute(blocks, (0, 1, 3, 2)))
    return tl.reshape(low, [ROWS, COLUMNS // 2]), tl.reshape(high, [ROWS, COLUMNS // 2])


@triton.jit
def joined(low, high, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Join two halves of a tile."""
    COLUMNS: tl.constexpr = columns(HEAD_DIM)
    BLOCK: tl.constexpr = rotation_width(HEAD_DIM)
    blocks = tl.reshape(tl.join(low, high), [ROWS, COLUMNS // BLOCK, BLOCK // 2, 2])
    return tl.reshape(tl.permute(blocks, (0, 1, 3, 2)), [ROWS, COLUMNS])


@triton.jit
def store_row_codes(
    target,
    codes,
    rows,
    inside,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write a tile of whole-number codes as packed rows, bytes from `target` on."""
    if BITS == 8:
        dims = tl.arange(0, columns(HEAD_DIM))
        at = rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target + at, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=cells(inside, HEAD_DIM))
    else:
        low, high = halves(codes.to(tl.int32) + (1 << (BITS - 1)), ROWS, HEAD_DIM)
        row_at = target + rows * (HEAD_DIM * BITS // 8)
        bytes_at = row_at[:, None] + tl.arange(0, columns(HEAD_DIM // 2))[None, :]
        lower = (low & 15) | ((high & 15) << 4)
        tl.store(bytes_at, lower.to(tl.uint8), mask=cells(inside, HEAD_DIM // 2))
        if BITS == 6:
            first, second = halves(low >> 4, ROWS, HEAD_DIM // 2)
            third, fourth = halves(high >> 4, ROWS, HEAD_DIM // 2)
            upper = first | (second << 2) | (third << 4) | (fourth << 6)
            pairs_at = (row_at + HEAD_DIM // 2)[:, None] + tl.arange(0, columns(HEAD_DIM // 4))[None, :]
            tl.store(pairs_at, upper.to(tl.uint8), mask=cells(inside, HEAD_DIM // 4))

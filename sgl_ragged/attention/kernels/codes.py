"""Keys and values in few bits, in kernels: as `mem_pool.quantise` defines them, bit for bit.

Rotations are sums and differences in a fixed order, divisions are rounded as the standard says, so that a row's codes
are the same wherever it is sealed. Tiles are padded (`dims`) by whole blocks of rotations: zeros stay zeros there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import cells, columns
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


@triton.jit
def float16_of(bits):
    """Return the float32 of a float16 given as a 16-bit integer."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def nibbles(packed, dtype: tl.constexpr):
    """Return the codes in the lower and upper halves of bytes, as numbers."""
    return ((packed & 15).to(tl.int8) - 8).to(dtype), ((packed >> 4).to(tl.int8) - 8).to(dtype)


@triton.jit
def _quarter(HEAD_DIM: tl.constexpr):
    """Of each dimension in the first halves of blocks: its place in its quarter of a block, and which quarter it is."""
    QUARTER: tl.constexpr = rotation_width(HEAD_DIM) // 4
    dims = tl.arange(0, columns(HEAD_DIM // 2))
    block = dims // (2 * QUARTER)
    return block * QUARTER + dims % QUARTER, dims // QUARTER % 2


@triton.jit
def load_pairs(rows_at, mask, HEAD_DIM: tl.constexpr):
    """Bytes of upper bits of six-bit codes, for each dimension in the first halves of blocks: each is read twice.

    Args:
        rows_at: pointers [ROWS] to where a row's upper bits are. mask: [ROWS, columns of HEAD_DIM / 2].
    """
    at, _ = _quarter(HEAD_DIM)
    return tl.load(rows_at[:, None] + at[None, :], mask=mask, other=0)


@triton.jit
def sixes(lower, pairs, HEAD_DIM: tl.constexpr):
    """Six-bit codes of the first and of the second halves of blocks, as numbers, from the bytes of both their parts."""
    _, quarter = _quarter(HEAD_DIM)
    shift = (2 * quarter).to(tl.uint8)[None, :]
    low = (lower & 15) | (((pairs >> shift) & 3) << 4)
    high = (lower >> 4) | (((pairs >> (shift + 4)) & 3) << 4)
    return (low.to(tl.int8) - 32).to(tl.float32), (high.to(tl.int8) - 32).to(tl.float32)


@triton.jit
def accumulate_codes(
    logits,
    packed,
    scales,
    dtype: tl.constexpr,
    best,
    total,
    output,
    other,
    VALUE_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `parts.accumulate`, of values in codes: the new (best, total, output, other).

    Logits are to base 2, and -inf where there is no row; every query has one. Of four bits, `output` and `other` are
    the dimensions of the lower and of the upper halves of bytes.
    """
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = (weights * scales[None, :]).to(dtype)
    output = output * shrink[:, None]
    if VALUE_BITS == 8:
        codes = packed.to(tl.int8, bitcast=True).to(dtype)
        output += tl.dot(weights, codes, input_precision=PRECISION)
    else:
        low, high = nibbles(packed, dtype)
        output += tl.dot(weights, low, input_precision=PRECISION)
        other = other * shrink[:, None]
        other += tl.dot(weights, high, input_precision=PRECISION)
    return new_best, total, output, other


@triton.jit
def outputs_of(output, other, VALUE_BITS: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rotate back sums of `accumulate_codes`: [BLOCK_M, next power of 2]."""
    if VALUE_BITS == 8:
        return rotated(output, BLOCK_M, HEAD_DIM)
    else:
        return rotated(joined(output, other, BLOCK_M, HEAD_DIM), BLOCK_M, HEAD_DIM)

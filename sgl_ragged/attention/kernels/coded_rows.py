"""Rows of codes in a tile: their numbers, and sums of values in codes. Shared by all walks over codes."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import joined, rotated, rotation_width
from sgl_ragged.attention.kernels.dims import columns


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

"""Keys and values in few bits, in kernels: as `mem_pool.quantise` defines them, bit for bit.

Rotations are sums and differences in a fixed order, divisions are rounded as the standard says, so that a row's codes
are the same wherever it is sealed. Tiles are padded (`columns`) by whole blocks of rotations: zeros stay zeros there.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import cells, columns
from sgl_ragged.mem_pool.quantise import ERROR_STEPS, FACTORS, MOST_STEPS, rotation_block
from sgl_ragged.mem_pool.slab_format import PLANES

_STEPS = tl.constexpr(8)
"""Of rotations at most: head dimensions up to 256."""

_MOST_STEPS = tl.constexpr(MOST_STEPS)

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


@triton.constexpr_function
def tried(bits: int) -> int:
    """Return the number of scales that are tried."""
    return len(FACTORS[bits])


@triton.constexpr_function
def factor(bits: int, number: int) -> float:
    """Return one of FACTORS."""
    return FACTORS[bits][number]


@triton.constexpr_function
def error_steps(bits: int, number: int) -> float:
    """Return the steps of a squared error in units of one of the scales, as float32 multiplies."""
    factor = np.float32(FACTORS[bits][number])
    return float(factor * factor * np.float32(ERROR_STEPS))


@triton.jit
def _coded(x, scale, BITS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Numbers in units of scales, and their codes, whole numbers in float32."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    units = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], [ROWS, columns(HEAD_DIM)]))
    return units, tl.minimum(tl.maximum(tl.floor(units), -HALF), HALF - 1)


@triton.jit
def quantised(x, BITS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Quantise a tile of rows, rotated, to codes, whole numbers in float32, and scales in float16 [ROWS]."""
    x = rotated(x, ROWS, HEAD_DIM)
    largest = tl.max(tl.abs(x), axis=1) * (0.5 ** (BITS - 1))
    undefined = tl.max((x != x).to(tl.int32), axis=1) > 0
    inside = (tl.arange(0, columns(HEAD_DIM)) < HEAD_DIM)[None, :]
    scale = tl.zeros([ROWS], tl.float16)
    least = tl.full([ROWS], float("inf"), tl.float32)
    for number in tl.static_range(tried(BITS)):
        one = tl.minimum(tl.maximum(largest * factor(BITS, number), 2.0**-24), 65504.0).to(tl.float16)
        if tried(BITS) == 1:
            scale = one
        else:
            units, codes = _coded(x, one, BITS, ROWS, HEAD_DIM)
            error = units - codes - 0.5
            # Whole numbers, whose sum does not depend on its order.
            steps = error * error * error_steps(BITS, number)
            steps = tl.floor(tl.minimum(tl.where(steps == steps, steps, 0.0), _MOST_STEPS))
            steps = tl.sum(tl.where(inside, steps, 0.0), axis=1)
            scale = tl.where(steps < least, one, scale)
            least = tl.minimum(steps, least)
    scale = tl.where(undefined, float("nan"), scale.to(tl.float32)).to(tl.float16)
    _, codes = _coded(x, scale, BITS, ROWS, HEAD_DIM)
    return tl.where(undefined[:, None], 0.0, codes), scale


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


@triton.constexpr_function
def plane(bits: int, number: int) -> int:
    """Return the bits of a plane of codes, 0 where there is none."""
    return PLANES[bits][number] if number < len(PLANES[bits]) else 0


@triton.jit
def _folded(numbers, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Fold numbers of WIDTH bits, 4, 2 or 1, into bytes, as `quantise.packed` does."""
    low, high = halves(numbers, ROWS, HEAD_DIM)
    folded = low | (high << 4)
    if WIDTH == 4:
        return folded
    else:
        low, high = halves(folded, ROWS, HEAD_DIM // 2)
        quarters = low | (high << 2)
        if WIDTH == 2:
            return quarters
        else:
            low, high = halves(quarters, ROWS, HEAD_DIM // 4)
            return low | (high << 1)


@triton.jit
def _store_plane(
    target, numbers, rows, inside, SHIFT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Write the bits from SHIFT on of a tile of numbers as rows of a plane."""
    BYTES: tl.constexpr = HEAD_DIM * WIDTH // 8
    folded = _folded((numbers >> SHIFT) & (2**WIDTH - 1), WIDTH, ROWS, HEAD_DIM)
    at = (target + rows * BYTES)[:, None] + tl.arange(0, columns(BYTES))[None, :]
    tl.store(at, folded.to(tl.uint8), mask=cells(inside, BYTES))


@triton.jit
def store_row_codes(
    target,
    codes,
    rows,
    inside,
    kept,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write a tile of whole-number codes to a head's `kept` rows in planes, bytes from `target` on."""
    if BITS == 8:
        dims = tl.arange(0, columns(HEAD_DIM))
        at = rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target + at, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=cells(inside, HEAD_DIM))
    else:
        FIRST: tl.constexpr = plane(BITS, 0)
        numbers = codes.to(tl.int32) + (1 << (BITS - 1))
        _store_plane(target, numbers, rows, inside, 0, FIRST, ROWS, HEAD_DIM)
        if FIRST < BITS:
            target += kept * (HEAD_DIM * FIRST // 8)
            _store_plane(target, numbers, rows, inside, FIRST, plane(BITS, 1), ROWS, HEAD_DIM)


@triton.jit
def float16_of(bits):
    """Return the float32 of a float16 given as a 16-bit integer."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte_of(WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the byte in a row of a plane and the place in it, for dimensions in the first halves of blocks."""
    HALF: tl.constexpr = rotation_width(HEAD_DIM) // 2
    BYTES: tl.constexpr = rotation_width(HEAD_DIM) * WIDTH // 8
    dims = tl.arange(0, columns(HEAD_DIM // 2))
    if WIDTH == 4:
        return dims, dims * 0
    else:
        return dims // HALF * BYTES + dims % HALF % BYTES, dims % HALF // BYTES


@triton.jit
def _load_plane(plane_at, rows, mask, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    byte, _ = _byte_of(WIDTH, HEAD_DIM)
    return tl.load((plane_at + rows * (HEAD_DIM * WIDTH // 8))[:, None] + byte[None, :], mask=mask, other=0)


@triton.jit
def load_planes(rows_at, rows, kept, mask, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load rows of codes of less than 8 bits: the bytes of the first and second plane [ROWS, columns of HEAD_DIM / 2].

    They have the bits of each dimension in the first halves of blocks, and of that in the second half. Bytes of planes
    of two bits are read twice, those of one bit four times. Without a second plane it is the first.

    Args:
        rows_at: pointer to the first plane of the head's `kept` rows. mask: [ROWS, columns of HEAD_DIM / 2].
    """
    first = _load_plane(rows_at, rows, mask, plane(BITS, 0), HEAD_DIM)
    if plane(BITS, 1) == 0:
        return first, first
    else:
        second_at = rows_at + kept * (HEAD_DIM * plane(BITS, 0) // 8)
        return first, _load_plane(second_at, rows, mask, plane(BITS, 1), HEAD_DIM)


@triton.jit
def _unfolded(loaded, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Bits of a plane in the first and second halves of blocks."""
    if WIDTH == 4:
        return loaded & 15, loaded >> 4
    else:
        _, place = _byte_of(WIDTH, HEAD_DIM)
        shifted = loaded >> (place * WIDTH).to(tl.uint8)[None, :]
        return shifted & (2**WIDTH - 1), (shifted >> 4) & (2**WIDTH - 1)


@triton.constexpr_function
def half_numbers(dtype: tl.dtype) -> tuple[int, int] | None:
    """Return the bits of 64 in a dtype of 16 bits, and those of 1/2 between 64 and 128; None for other dtypes."""
    return {tl.bfloat16: (0x4280, 0x01), tl.float16: (0x5400, 0x08)}.get(dtype)


@triton.jit
def _level(code, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes plus 1/2 as numbers, which are exact, for codes uint8 plus 2^(BITS - 1)."""
    if half_numbers(dtype) is None:
        return code.to(dtype) - (2**BITS - 1) / 2
    else:
        # A code is the last bits of a number between 64 and 128, which needs no conversion.
        WHOLE: tl.constexpr = 2 * half_numbers(dtype)[1]
        numbers = code.to(tl.uint16) * WHOLE | (half_numbers(dtype)[0] | half_numbers(dtype)[1])
        return numbers.to(dtype, bitcast=True) - (64.0 + 2 ** (BITS - 1))


@triton.jit
def levels(first, second, dtype: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Codes plus 1/2 of the first and second halves of blocks, from `load_planes`."""
    low, high = _unfolded(first, plane(BITS, 0), HEAD_DIM)
    if plane(BITS, 1) > 0:
        more_low, more_high = _unfolded(second, plane(BITS, 1), HEAD_DIM)
        low, high = low | (more_low << plane(BITS, 0)), high | (more_high << plane(BITS, 0))
    return _level(low, dtype, BITS), _level(high, dtype, BITS)


@triton.jit
def accumulate_codes(
    logits,
    packed,
    second,
    scales,
    dtype: tl.constexpr,
    best,
    total,
    output,
    other,
    VALUE_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Accumulate values in codes like `primitives.accumulate`; return the new (best, total, output, other).

    Logits are to base 2, and -inf where there is no row; every query has one. `packed` and `second` are the bytes of
    both planes, of 8 bits the codes. Of less than 8 bits, `output` and `other` are the dimensions of the first and of
    the second halves of blocks.
    """
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = (weights * scales[None, :]).to(dtype)
    output = output * shrink[:, None]
    if VALUE_BITS == 8:
        codes = packed.to(tl.int8, bitcast=True).to(dtype) + 0.5
        output += tl.dot(weights, codes, input_precision=PRECISION)
    else:
        low, high = levels(packed, second, dtype, VALUE_BITS, HEAD_DIM)
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

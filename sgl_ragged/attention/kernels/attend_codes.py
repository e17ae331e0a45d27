"""The walk over kept rows in codes of few bits (`slab_format`).

Queries are rotated before it and outputs after it, once per CTA. Scales of keys go into logits, those of values into
weights: codes are multiplied as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.attend import segment_of
from sgl_ragged.attention.kernels.coded_rows import accumulate_codes, float16_of, outputs_of
from sgl_ragged.attention.kernels.codes import rotated
from sgl_ragged.attention.kernels.dims import cells_until, columns


@triton.jit
def attend_codes(
    query,
    slabs_ptr,
    slots_at,
    key_blocks_at,
    slab_bytes,
    kept,
    begin,
    end,
    scale2,
    VALUE_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Attend to the kept rows [begin, end) of the segments whose slots are at `slots_at`: (best, total, output).

    Keys have 8 bits. `slabs_ptr` points to bytes, `key_blocks_at` to where the head's keys start, in blocks of 16;
    `scale2` is to base 2.
    """
    VALUE_BYTES: tl.constexpr = HEAD_DIM * VALUE_BITS // 8
    VALUE_COLUMNS: tl.constexpr = columns(VALUE_BYTES)
    dims = tl.arange(0, columns(HEAD_DIM))
    tile_rows = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Of four bits, the dimensions of the lower and of the upper halves of bytes apart.
    output = tl.zeros([BLOCK_M, VALUE_COLUMNS], tl.float32)
    other = tl.zeros([BLOCK_M, VALUE_COLUMNS], tl.float32)
    turned = rotated(query, BLOCK_M, HEAD_DIM).to(query.dtype)
    key_at = tl.load(key_blocks_at) * 16
    value_at = key_at + kept * HEAD_DIM
    scale_at = value_at + kept * VALUE_BYTES
    divisor = kept
    if PARTIAL:
        # A head that only other ranks store has no rows here, and nothing to divide.
        divisor = tl.maximum(kept, 1)
    per_unit = 16.0 / divisor
    number = begin + tile_rows
    slot = tl.load(slots_at + segment_of(number, per_unit), mask=number < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        number = start + tile_rows
        valid = number < end
        slab = slabs_ptr + slot.to(tl.int64) * slab_bytes
        row = number - segment_of(number, per_unit) * kept
        scales_at = (slab + scale_at + row * 4).to(tl.pointer_type(tl.int32))
        scales = tl.load(scales_at, mask=valid, other=0)
        keys_at = (slab + key_at + row * HEAD_DIM).to(tl.pointer_type(tl.int8))
        keys = tl.load(keys_at[:, None] + dims[None, :], mask=cells_until(number, end, HEAD_DIM), other=0)
        values_at = (slab + value_at + row * VALUE_BYTES)[:, None] + tl.arange(0, VALUE_COLUMNS)[None, :]
        # Columns beyond the row's bytes come to codes of -8, and to outputs that are not written.
        packed = tl.load(values_at, mask=cells_until(number, end, VALUE_BYTES), other=0)
        following = number + BLOCK_N
        slot = tl.load(slots_at + segment_of(following, per_unit), mask=following < end, other=0)

        logits = tl.dot(turned, tl.trans(keys.to(query.dtype)), input_precision=PRECISION)
        logits = tl.where(valid[None, :], logits * (float16_of(scales & 0xFFFF) * scale2)[None, :], float("-inf"))
        best, total, output, other = accumulate_codes(
            logits, packed, float16_of(scales >> 16), query.dtype, best, total, output, other, VALUE_BITS, PRECISION
        )
    return best, total, outputs_of(output, other, VALUE_BITS, BLOCK_M, HEAD_DIM)

"""The walk over what a head's queries see: kept rows of sealed segments, then tokens of the open segment.

Decode and extend differ in their queries and in who walks which rows; how rows are found and read is here alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import (
    accumulate_codes,
    float16_of,
    halves,
    levels,
    load_planes,
    outputs_of,
    rotated,
)
from sgl_ragged.attention.kernels.primitives import (
    accumulate,
    cells,
    cells_until,
    columns,
    entry_of,
    page_at,
    row_in_page,
)
from sgl_ragged.attention.kernels.row_moments import load_moments


@triton.jit
def segment_of(number, per_unit):
    """Return the index of the seen segment that holds kept row `number` of a head; per_unit is 16 / kept.

    A division by multiplication: integer division in every row of every tile would take a third of the kernel's
    instructions. Rows are kept in units of 16, and half a unit keeps float32 exact up to millions of units.
    """
    return (((number >> 4).to(tl.float32) + 0.5) * per_unit).to(tl.int32)


@triton.jit
def attend_wide(
    query,
    best,
    total,
    output,
    slabs_ptr,
    slots_at,
    key_blocks_at,
    slab_elems,
    kept,
    begin,
    end,
    scale2,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Attend to the kept rows [begin, end) of the segments whose slots are at `slots_at`: new (best, total, output).

    `key_blocks_at` points to where the head's keys start in a slab, in blocks of 16 elements; `scale2` is to base 2.
    """
    dims = tl.arange(0, columns(HEAD_DIM))
    tile_rows = tl.arange(0, BLOCK_N)
    # A constant factor is what tells the compiler that rows are aligned.
    key_offset = tl.load(key_blocks_at) * 16
    value_offset = kept * HEAD_DIM
    divisor = kept
    if PARTIAL:
        # A head that only other ranks store has no rows here, and nothing to divide.
        divisor = tl.maximum(kept, 1)
    per_unit = 16.0 / divisor
    number = begin + tile_rows
    # Slots are read one tile ahead and carried as loaded: anything else takes the loads of keys and values out of
    # the software pipeline.
    slot = tl.load(slots_at + segment_of(number, per_unit), mask=number < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        number = start + tile_rows
        valid = number < end
        at = slot.to(tl.int64) * slab_elems + key_offset + (number - segment_of(number, per_unit) * kept) * HEAD_DIM
        pointers = slabs_ptr + at[:, None] + dims[None, :]
        mask = cells_until(number, end, HEAD_DIM)
        keys = tl.load(pointers, mask=mask, other=0.0)
        values = tl.load(pointers + value_offset, mask=mask, other=0.0)
        following = number + BLOCK_N
        slot = tl.load(slots_at + segment_of(following, per_unit), mask=following < end, other=0)
        best, total, output = accumulate(query, keys, values, valid[None, :], scale2, best, total, output, PRECISION)
    return best, total, output


@triton.jit
def attend_tail(
    query,
    best,
    total,
    output,
    tail_at,
    pages_at,
    page_units,
    value_offset,
    begin,
    end,
    scale2,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the tokens [begin, end) of the open segment with the pages at `pages_at`: new (best, total, output).

    `tail_at` is where the head's keys start in page 0; its values start `value_offset` after its keys.
    """
    dims = tl.arange(0, columns(HEAD_DIM))
    tile_rows = tl.arange(0, BLOCK_N)
    if PAGES == 1:
        tail_at += page_at(tl.load(pages_at), page_units, UNIT)
    else:
        # Read ahead, as slots are in `attend_wide`.
        number = begin + tile_rows
        page = tl.load(pages_at + entry_of(number, TOKENS), mask=number < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        number = start + tile_rows
        valid = number < end
        at = row_in_page(number, TOKENS) * HEAD_DIM
        if PAGES > 1:
            at += page_at(page, page_units, UNIT)
        pointers = tail_at + at[:, None] + dims[None, :]
        mask = cells_until(number, end, HEAD_DIM)
        keys = tl.load(pointers, mask=mask, other=0.0)
        values = tl.load(pointers + value_offset, mask=mask, other=0.0)
        if PAGES > 1:
            # The last token's page in place of a mask: that is what keeps registers from spilling.
            following = tl.minimum(number + BLOCK_N, end - 1)
            page = tl.load(pages_at + entry_of(following, TOKENS))
        best, total, output = accumulate(query, keys, values, valid[None, :], scale2, best, total, output, PRECISION)
    return best, total, output


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
    VALUE_COLUMNS: tl.constexpr = columns(HEAD_DIM if VALUE_BITS == 8 else HEAD_DIM // 2)
    dims = tl.arange(0, columns(HEAD_DIM))
    tile_rows = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Of less than 8 bits, the dimensions of the first and of the second halves of blocks apart.
    output = tl.zeros([BLOCK_M, VALUE_COLUMNS], tl.float32)
    other = tl.zeros([BLOCK_M, VALUE_COLUMNS], tl.float32)
    turned = rotated(query, BLOCK_M, HEAD_DIM).to(query.dtype)
    key_at = tl.load(key_blocks_at) * 16
    value_at = key_at + kept * HEAD_DIM
    scale_at = value_at + kept * (HEAD_DIM * VALUE_BITS // 8)
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
        # Columns beyond the row come to codes other than zero, and to outputs that are not written.
        if VALUE_BITS == 8:
            values_at = (slab + value_at + row * HEAD_DIM)[:, None] + dims[None, :]
            packed = tl.load(values_at, mask=cells_until(number, end, HEAD_DIM), other=0)
            second = packed
        else:
            mask = cells_until(number, end, HEAD_DIM // 2)
            packed, second = load_planes(slab + value_at, row, kept, mask, VALUE_BITS, HEAD_DIM)
        following = number + BLOCK_N
        slot = tl.load(slots_at + segment_of(following, per_unit), mask=following < end, other=0)

        logits = tl.dot(turned, tl.trans(keys.to(query.dtype) + 0.5), input_precision=PRECISION)
        logits = tl.where(valid[None, :], logits * (float16_of(scales & 0xFFFF) * scale2)[None, :], float("-inf"))
        best, total, output, other = accumulate_codes(
            logits,
            packed,
            second,
            float16_of(scales >> 16),
            query.dtype,
            best,
            total,
            output,
            other,
            VALUE_BITS,
            PRECISION,
            HEAD_DIM,
        )
    return best, total, outputs_of(output, other, VALUE_BITS, BLOCK_M, HEAD_DIM)


@triton.jit
def attend_centred(
    query,
    slabs_ptr,
    slots_at,
    key_blocks_at,
    slab_bytes,
    kept,
    begin,
    end,
    scale2,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend as `attend_codes` does; keys have 6 bits or less, and are centred."""
    BYTE_COLUMNS: tl.constexpr = columns(HEAD_DIM // 2)
    tile_rows = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BYTE_COLUMNS], tl.float32)
    other = tl.zeros([BLOCK_M, BYTE_COLUMNS], tl.float32)
    # Queries as a segment's keys are stored, first and second halves of blocks, and their products with its mean.
    first = tl.zeros([BLOCK_M, BYTE_COLUMNS], query.dtype)
    second = tl.zeros([BLOCK_M, BYTE_COLUMNS], query.dtype)
    bias = tl.zeros([BLOCK_M], tl.float32)
    key_at = tl.load(key_blocks_at) * 16
    value_at = kept * (HEAD_DIM * KEY_BITS // 8)
    scale_at = value_at + kept * (HEAD_DIM * VALUE_BITS // 8)
    # A head that only other ranks store has no rows here, and nothing to divide.
    divisor = tl.maximum(kept, 1)
    per_segment = (divisor + BLOCK_N - 1) // BLOCK_N
    last = tl.maximum(end - 1, 0)
    first_tile = begin // divisor * per_segment + begin % divisor // BLOCK_N
    last_tile = last // divisor * per_segment + last % divisor // BLOCK_N
    end_tile = tl.where(begin < end, last_tile + 1, first_tile)
    slot = tl.load(slots_at + first_tile // per_segment, mask=begin < end, other=0)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        segment = tile // per_segment
        row = (tile - segment * per_segment) * BLOCK_N + tile_rows
        number = segment * divisor + row
        valid = (row < kept) & (number >= begin) & (number < end)
        part = slabs_ptr + slot.to(tl.int64) * slab_bytes + key_at
        scales = tl.load((part + scale_at + row * 4).to(tl.pointer_type(tl.int32)), mask=valid, other=0)
        mask = cells(valid, HEAD_DIM // 2)
        # Columns beyond the row come to codes other than zero. Queries have nothing there, and values are not written.
        key_bytes, more_key_bytes = load_planes(part, row, kept, mask, KEY_BITS, HEAD_DIM)
        value_bytes, more_value_bytes = load_planes(part + value_at, row, kept, mask, VALUE_BITS, HEAD_DIM)
        mean, spread = load_moments(part, HEAD_DIM)
        following = tile + 1
        slot = tl.load(slots_at + following // per_segment, mask=following < end_tile, other=0)

        if (tile == first_tile) | (tile == segment * per_segment):
            wide = query.to(tl.float32)
            turned = rotated(wide * spread[None, :], BLOCK_M, HEAD_DIM).to(query.dtype)
            first, second = halves(turned, BLOCK_M, HEAD_DIM)
            bias = tl.sum(wide * mean[None, :], axis=1) * scale2
        low, high = levels(key_bytes, more_key_bytes, query.dtype, KEY_BITS, HEAD_DIM)
        logits = tl.dot(first, tl.trans(low), input_precision=PRECISION)
        logits += tl.dot(second, tl.trans(high), input_precision=PRECISION)
        # The sign says where the mean was not subtracted.
        logits *= (float16_of(scales & 0x7FFF) * scale2)[None, :]
        logits += tl.where(((scales & 0x8000) == 0)[None, :], bias[:, None], 0.0)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        best, total, output, other = accumulate_codes(
            logits,
            value_bytes,
            more_value_bytes,
            float16_of(scales >> 16),
            query.dtype,
            best,
            total,
            output,
            other,
            VALUE_BITS,
            PRECISION,
            HEAD_DIM,
        )
    return best, total, outputs_of(output, other, VALUE_BITS, BLOCK_M, HEAD_DIM)


@triton.jit
def attend_slabs(
    query,
    best,
    total,
    output,
    slabs_ptr,
    slots_at,
    key_blocks_at,
    slab_elems,
    kept,
    begin,
    end,
    scale2,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CENTRED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """`attend.attend_wide` over slabs of any format, before anything else is attended to. KEY_BITS: 0 where wide."""
    if KEY_BITS == 0:
        best, total, output = attend_wide(
            query,
            best,
            total,
            output,
            slabs_ptr,
            slots_at,
            key_blocks_at,
            slab_elems,
            kept,
            begin,
            end,
            scale2,
            HEAD_DIM,
            BLOCK_N,
            STAGES,
            PRECISION,
            PARTIAL,
        )
    elif CENTRED:
        best, total, output = attend_centred(
            query,
            slabs_ptr,
            slots_at,
            key_blocks_at,
            slab_elems,
            kept,
            begin,
            end,
            scale2,
            KEY_BITS,
            VALUE_BITS,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            STAGES,
            PRECISION,
        )
    else:
        best, total, output = attend_codes(
            query,
            slabs_ptr,
            slots_at,
            key_blocks_at,
            slab_elems,
            kept,
            begin,
            end,
            scale2,
            VALUE_BITS,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            STAGES,
            PRECISION,
            PARTIAL,
        )
    return best, total, output

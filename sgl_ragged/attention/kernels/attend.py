"""The walk over what a head's queries see: kept rows of sealed segments, then tokens of the open segment.

Decode and extend differ in their queries and in who walks which rows; how rows are found and read is here alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import (
    accumulate_codes,
    float16_of,
    joined,
    load_pairs,
    nibbles,
    outputs_of,
    rotated,
    sixes,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend as `attend_codes.attend_codes` does; keys have 6 or 4 bits, values 4."""
    KEY_BYTES: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = HEAD_DIM // 2
    BYTE_COLUMNS: tl.constexpr = columns(VALUE_BYTES)
    tile_rows = tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BYTE_COLUMNS)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BYTE_COLUMNS], tl.float32)
    other = tl.zeros([BLOCK_M, BYTE_COLUMNS], tl.float32)
    key_at = tl.load(key_blocks_at) * 16
    value_at = kept * KEY_BYTES
    scale_at = value_at + kept * VALUE_BYTES
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
        keys_at = part + row * KEY_BYTES
        mask = cells(valid, VALUE_BYTES)
        key_bytes = tl.load(keys_at[:, None] + byte[None, :], mask=mask, other=0)
        # Columns beyond the row's bytes come to codes of -8 and -32: of keys, queries have nothing there, and of
        # values, which are not written.
        value_bytes = tl.load((part + value_at + row * VALUE_BYTES)[:, None] + byte[None, :], mask=mask, other=0)
        pairs = key_bytes
        if KEY_BITS == 6:
            pairs = load_pairs(keys_at + VALUE_BYTES, mask, HEAD_DIM)
        mean, spread = load_moments(part, HEAD_DIM)
        following = tile + 1
        slot = tl.load(slots_at + following // per_segment, mask=following < end_tile, other=0)

        if KEY_BITS == 6:
            low, high = sixes(key_bytes, pairs, HEAD_DIM)
        else:
            low, high = nibbles(key_bytes, tl.float32)
        codes = joined(low, high, BLOCK_N, HEAD_DIM)
        keys = rotated(codes, BLOCK_N, HEAD_DIM) * float16_of(scales & 0xFFFF)[:, None]
        keys = (keys * spread[None, :] + mean[None, :]).to(query.dtype)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale2
        logits = tl.where(valid[None, :], logits, float("-inf"))
        best, total, output, other = accumulate_codes(
            logits, value_bytes, float16_of(scales >> 16), query.dtype, best, total, output, other, 4, PRECISION
        )
    return best, total, outputs_of(output, other, 4, BLOCK_M, HEAD_DIM)


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

"""The walk over what a head's queries see: kept rows of sealed segments, then tokens of the open segment.

Decode and extend differ in their queries and in who walks which rows; how rows are found and read is here alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.dims import cells_until, columns
from sgl_ragged.attention.kernels.pages import entry_of, page_at, row_in_page
from sgl_ragged.attention.kernels.parts import accumulate


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

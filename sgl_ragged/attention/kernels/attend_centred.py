"""The walk over kept rows in codes of keys that are centred: less their mean, in units of their spread.

Moments belong to a head and segment, so a tile holds rows of one segment, and the last of each may be half empty. Keys
are turned back into numbers in registers, and from there on are what a wide slab would have held.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.coded_rows import accumulate_codes, float16_of, load_pairs, nibbles, outputs_of, sixes
from sgl_ragged.attention.kernels.codes import joined, rotated
from sgl_ragged.attention.kernels.dims import cells, columns
from sgl_ragged.attention.kernels.row_moments import load_moments


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

"""The walk over sealed segments of any format: chooses the walk of the format."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.attend import attend_wide
from sgl_ragged.attention.kernels.attend_centred import attend_centred
from sgl_ragged.attention.kernels.attend_codes import attend_codes


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

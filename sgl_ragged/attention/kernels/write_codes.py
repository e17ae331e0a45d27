"""Write rows that are in codes already, as fitting leaves them, to their slabs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import store_row_codes
from sgl_ragged.attention.kernels.primitives import cells, columns
from sgl_ragged.attention.kernels.row_moments import moments_at, scales_at
from sgl_ragged.mem_pool.corrected import CodedHeads
from sgl_ragged.mem_pool.slab_format import SlabFormat

ROWS = 16
"""Rows that one CTA writes."""


@triton.jit
def write_codes_kernel(
    keys_ptr,
    values_ptr,
    scales_ptr,
    moments_ptr,
    heads_ptr,
    slabs_ptr,
    slots_ptr,
    kept_ptr,
    first_ptr,
    key_blocks_ptr,
    slab_elems,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
):
    segment, place, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    head = tl.load(heads_ptr + place)
    kept = tl.load(kept_ptr + head)
    own = (segment * heads + place).to(tl.int64)
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    target = slabs_ptr + slot * slab_elems + tl.load(key_blocks_ptr + head) * 16
    dims = tl.arange(0, columns(HEAD_DIM))
    if moments_ptr is not None:
        # Every CTA of a head writes the same.
        moments = moments_at(target, HEAD_DIM)
        for part in tl.static_range(2):
            at = (own * 2 + part) * HEAD_DIM + dims
            found = tl.load(moments_ptr + at, mask=dims < HEAD_DIM, other=0.0)
            tl.store(moments + part * HEAD_DIM + dims, found, mask=(dims < HEAD_DIM) & (kept > 0))
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < kept
    number = own * rows + tl.load(first_ptr + head) + row
    at, mask = number[:, None] * HEAD_DIM + dims[None, :], cells(inside, HEAD_DIM)
    scale_at = scales_at(target, row, kept, HEAD_DIM * (KEY_BITS + VALUE_BITS) // 8)
    for part in tl.static_range(2):
        tl.store(scale_at + part, tl.load(scales_ptr + number * 2 + part, mask=inside), mask=inside)
    keys = tl.load(keys_ptr + at, mask=mask, other=0)
    store_row_codes(target, keys, row, inside, kept, KEY_BITS, BLOCK_R, HEAD_DIM)
    target += kept * (HEAD_DIM * KEY_BITS // 8)
    values = tl.load(values_ptr + at, mask=mask, other=0)
    store_row_codes(target, values, row, inside, kept, VALUE_BITS, BLOCK_R, HEAD_DIM)


def write_codes(
    coded: CodedHeads,
    slabs: torch.Tensor,
    slots: torch.Tensor,
    kept: torch.Tensor,
    first: torch.Tensor,
    key_blocks: torch.Tensor,
    most_kept: int,
    form: SlabFormat,
) -> None:
    """Write corrected heads of segments to their slabs. Changes `slabs` alone.

    Args:
        slots, kept, key_blocks, most_kept: as in `seal.gather`.
        first: int64 [heads], rows of each head that are stored on lower ranks.
    """
    keys, values, moments = coded.codes.keys, coded.codes.values, coded.codes.moments
    segments, heads, rows, head_dim = keys.codes.shape
    write_codes_kernel[(segments, heads, triton.cdiv(most_kept, ROWS))](
        keys.codes.contiguous(),
        values.codes.contiguous(),
        torch.stack([keys.scales, values.scales], dim=-1),
        None if moments is None else moments.contiguous(),
        coded.heads,
        slabs,
        slots,
        kept,
        first,
        key_blocks,
        slabs.stride(0),
        rows,
        HEAD_DIM=head_dim,
        BLOCK_R=ROWS,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        num_warps=4,
    )

"""Moments of the keys that heads keep, as `mem_pool.row_moments` defines them, bit for bit; and rows by them.

They are a launch of their own before `seal.gather`: every CTA that rounds some of a head's rows needs those of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import begin_of, columns, row_starts
from sgl_ragged.mem_pool.row_moments import BLOCK, LEAST_SHARE
from sgl_ragged.mem_pool.slab_format import SlabFormat

if TYPE_CHECKING:
    from sgl_ragged.attention.kernels.seal import Source

OPTIONS = {"enable_fp_fusion": False}
"""For the compiler: squares are rounded before they are added, as in torch."""

_BLOCK, _LEAST_SHARE = tl.constexpr(BLOCK), tl.constexpr(LEAST_SHARE)


@triton.jit
def moments_at(key_at, HEAD_DIM: tl.constexpr):
    """Return the address of a head's moments, float16 [2 (mean, spread), HEAD_DIM], before its keys."""
    return (key_at - 4 * HEAD_DIM).to(tl.pointer_type(tl.float16))


@triton.jit
def load_moments(key_at, HEAD_DIM: tl.constexpr):
    """Mean and spread in float32, [next power of 2]: 0 and 1 beyond the head."""
    at, dims = moments_at(key_at, HEAD_DIM), tl.arange(0, columns(HEAD_DIM))
    mean = tl.load(at + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    spread = tl.load(at + HEAD_DIM + dims, mask=dims < HEAD_DIM, other=1.0).to(tl.float32)
    return mean, spread


@triton.jit
def scales_at(key_at, row, kept, CODE_BYTES: tl.constexpr):
    """Return the addresses of the scales, float16 [2 (K, V)], of a head's rows."""
    return (key_at + kept * CODE_BYTES + row * 4).to(tl.pointer_type(tl.float16))


@triton.jit
def centred(keys, key_at, scale_at, inside, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A tile of keys in units of their spread, less the mean where the sign at `scale_at` is positive, in float32; and
    these signs."""
    mean, spread = load_moments(key_at, HEAD_DIM)
    sign = tl.load(scale_at, mask=inside, other=1.0)
    wide = tl.broadcast_to(spread[None, :], [ROWS, columns(HEAD_DIM)])
    own = tl.where((sign > 0)[:, None], mean[None, :], 0.0)
    return tl.div_rn(keys.to(tl.float32) - own, wide), sign


@triton.jit
def _folded(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first half of the rows plus the second."""
    one, other = tl.split(tl.permute(tl.reshape(x, [2, ROWS // 2, COLUMNS]), (1, 2, 0)))
    return one + other


@triton.jit
def _total_of_dims(x, COLUMNS: tl.constexpr):
    """Sums [BLOCK] over the dimensions, half to half."""
    for step in tl.static_range(8):
        if (COLUMNS >> step) > 1:
            x = tl.reshape(x, [_BLOCK, 2, COLUMNS >> (step + 1)])
            one, other = tl.split(tl.permute(x, (0, 2, 1)))
            x = one + other
    return tl.reshape(x, [_BLOCK])


@triton.jit
def _averaged(total, count, COLUMNS: tl.constexpr):
    """Mean over the rows of what [BLOCK, COLUMNS] partial sums add up to, in a fixed order."""
    total = _folded(total, 16, COLUMNS)
    total = _folded(total, 8, COLUMNS)
    total = _folded(total, 4, COLUMNS)
    total = tl.reshape(_folded(total, 2, COLUMNS), [COLUMNS])
    return tl.div_rn(total, tl.zeros([COLUMNS], tl.float32) + count)


@triton.jit
def _bounded(keys_at, at, HEAD_DIM: tl.constexpr):
    """Load the keys at int64 [rows] as numbers of float16's range; NaN as zero."""
    dims = tl.arange(0, columns(HEAD_DIM))
    keys = tl.load(keys_at + at[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0).to(tl.float32)
    keys = tl.where(keys == keys, keys, 0.0)
    return tl.minimum(tl.maximum(keys, -65504.0), 65504.0)


@triton.jit
def row_moments_kernel(
    keys_ptr,
    firsts_ptr,
    slabs_ptr,
    slots_ptr,
    positions_ptr,
    kept_ptr,
    key_blocks_ptr,
    key_first_step,
    key_stride,
    layer_stride,
    head_stride,
    slab_elems,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    COLUMNS: tl.constexpr = columns(HEAD_DIM)
    segment = tl.program_id(0)
    head = tl.program_id(1)
    kept = tl.load(kept_ptr + head)
    if kept == 0:
        return
    offset = head // HEADS * layer_stride + head % HEADS * head_stride
    keys_at = begin_of(keys_ptr, firsts_ptr, segment, key_first_step, offset, PAGES, UNIT)
    rows = tl.arange(0, _BLOCK)
    tokens_at = positions_ptr + (segment * tl.num_programs(1) + head) * SEGMENT + rows
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    key_at = slabs_ptr + slot * slab_elems + tl.load(key_blocks_ptr + head) * 16

    # Mean of all rows, then their distances from it, then the same of those rows that count.
    mean, widths = tl.zeros([COLUMNS], tl.float32), tl.full([COLUMNS], 1.0, tl.float32)
    own_mean, weights, spread = mean, mean, widths
    counted = 0
    for step in tl.static_range(4):
        total = tl.zeros([_BLOCK, COLUMNS], tl.float32)
        for start in range(0, kept, _BLOCK):
            token = tl.load(tokens_at + start)
            at = row_starts(firsts_ptr, segment, token, token >= 0, key_first_step, key_stride, TOKENS, PAGES, UNIT)
            x = _bounded(keys_at, at, HEAD_DIM)
            if step == 1:
                x = x - mean[None, :]
                x = x * x
            if step >= 2:
                nearer = _total_of_dims((2.0 * x - mean[None, :]) * weights[None, :], COLUMNS)
                counts = tl.where(nearer < 0.0, 0.0, 1.0)
                if step == 2:
                    counted += tl.sum(counts.to(tl.int32), axis=0)
                    sign_at = scales_at(key_at, start + rows, kept, CODE_BYTES)
                    tl.store(sign_at, (2.0 * counts - 1.0).to(tl.float16))
                    x = x * counts[:, None]
                else:
                    x = (x - own_mean[None, :]) * counts[:, None]
                    x = x * x
            total += x
        if step == 0:
            mean = _averaged(total, kept, COLUMNS).to(tl.float16).to(tl.float32)
        if step == 1:
            widths = tl.sqrt_rn(_averaged(total, kept, COLUMNS))
            weights = tl.div_rn(mean, tl.maximum(widths, 2.0**-24))
        if step == 2:
            own_mean = _averaged(total, tl.maximum(counted, 1), COLUMNS).to(tl.float16).to(tl.float32)
        if step == 3:
            spread = tl.sqrt_rn(_averaged(total, tl.maximum(counted, 1), COLUMNS))
    spread = tl.maximum(tl.sqrt_rn(tl.maximum(spread, widths * _LEAST_SHARE)), 2.0**-24)

    dims = tl.arange(0, COLUMNS)
    inside = dims < HEAD_DIM
    target = moments_at(key_at, HEAD_DIM)
    tl.store(target + dims, own_mean.to(tl.float16), mask=inside)
    tl.store(target + HEAD_DIM + dims, spread.to(tl.float16), mask=inside)


def moments_warps(head_dim: int) -> int:
    """Return the warps of `row_moments_kernel`; four would spill where rows are wider."""
    return 8 if head_dim > 128 else 4


def write_moments(
    source: Source,
    slabs: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    head_dim: int,
    form: SlabFormat,
) -> None:
    """Write the moments of each segment and head that keeps anything to its slab, and signs in place of its rows' key
    scales, -1 for uncentred rows; arguments as in `seal.gather`."""
    row_moments_kernel[positions.shape[:2]](
        source.keys,
        source.firsts,
        slabs,
        slots,
        positions,
        kept,
        key_blocks,
        source.key_first_step,
        source.key_stride,
        source.layer_stride,
        source.head_stride,
        slabs.stride(0),
        **source.constants,
        SEGMENT=positions.shape[2],
        HEAD_DIM=head_dim,
        CODE_BYTES=form.code_bytes(head_dim),
        num_warps=moments_warps(head_dim),
        **OPTIONS,
    )

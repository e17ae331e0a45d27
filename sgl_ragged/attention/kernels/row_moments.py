"""Moments of the keys that heads keep, as `mem_pool.row_moments` defines them, bit for bit; and rows by them.

They are a launch of their own before `seal.gather`: every CTA that rounds some of a head's rows needs those of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import begin_of, columns, row_starts
from sgl_ragged.mem_pool.row_moments import BLOCK

if TYPE_CHECKING:
    from sgl_ragged.attention.kernels.seal import Source

OPTIONS = {"enable_fp_fusion": False}
"""For the compiler: squares are rounded before they are added, as in torch."""

_BLOCK = tl.constexpr(BLOCK)


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
def centred(keys, key_at, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A tile of keys less their mean, in units of their spread, in float32."""
    mean, spread = load_moments(key_at, HEAD_DIM)
    wide = tl.broadcast_to(spread[None, :], [ROWS, columns(HEAD_DIM)])
    return tl.div_rn(keys.to(tl.float32) - mean[None, :], wide)


@triton.jit
def _folded(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first half of the rows plus the second."""
    one, other = tl.split(tl.permute(tl.reshape(x, [2, ROWS // 2, COLUMNS]), (1, 2, 0)))
    return one + other


@triton.jit
def _averaged(total, kept, COLUMNS: tl.constexpr):
    """Mean over the rows of what [BLOCK, COLUMNS] partial sums add up to, in a fixed order."""
    total = _folded(total, 16, COLUMNS)
    total = _folded(total, 8, COLUMNS)
    total = _folded(total, 4, COLUMNS)
    total = tl.reshape(_folded(total, 2, COLUMNS), [COLUMNS])
    return tl.div_rn(total, tl.zeros([COLUMNS], tl.float32) + kept)


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
):
    COLUMNS: tl.constexpr = columns(HEAD_DIM)
    segment = tl.program_id(0)
    head = tl.program_id(1)
    kept = tl.load(kept_ptr + head)
    if kept == 0:
        return
    offset = head // HEADS * layer_stride + head % HEADS * head_stride
    keys_at = begin_of(keys_ptr, firsts_ptr, segment, key_first_step, offset, PAGES, UNIT)
    tokens_at = positions_ptr + (segment * tl.num_programs(1) + head) * SEGMENT + tl.arange(0, _BLOCK)
    dims = tl.arange(0, COLUMNS)
    inside = dims < HEAD_DIM

    total = tl.zeros([_BLOCK, COLUMNS], tl.float32)
    for start in range(0, kept, _BLOCK):
        token = tl.load(tokens_at + start)
        at = row_starts(firsts_ptr, segment, token, token >= 0, key_first_step, key_stride, TOKENS, PAGES, UNIT)
        total += _bounded(keys_at, at, HEAD_DIM)
    mean = _averaged(total, kept, COLUMNS).to(tl.float16)

    total = tl.zeros([_BLOCK, COLUMNS], tl.float32)
    for start in range(0, kept, _BLOCK):
        token = tl.load(tokens_at + start)
        at = row_starts(firsts_ptr, segment, token, token >= 0, key_first_step, key_stride, TOKENS, PAGES, UNIT)
        distance = _bounded(keys_at, at, HEAD_DIM) - mean.to(tl.float32)[None, :]
        total += distance * distance
    spread = tl.sqrt_rn(tl.sqrt_rn(_averaged(total, kept, COLUMNS)))
    spread = tl.maximum(spread, 2.0**-24).to(tl.float16)

    slot = tl.load(slots_ptr + segment).to(tl.int64)
    target = moments_at(slabs_ptr + slot * slab_elems + tl.load(key_blocks_ptr + head) * 16, HEAD_DIM)
    tl.store(target + dims, mean, mask=inside)
    tl.store(target + HEAD_DIM + dims, spread, mask=inside)


def write_moments(
    source: Source,
    slabs: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    head_dim: int,
) -> None:
    """Write the moments of each segment and head that keeps anything to its slab; arguments as in `seal.gather`."""
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
        num_warps=4,
        **OPTIONS,
    )

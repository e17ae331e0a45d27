"""Online softmax over tiles of rows, and the merge of CTAs' parts, for decode and extend."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_ragged.attention.kernels.dims import cells, columns

COMBINED_PARTS = 32
"""Parts that the combine kernel reads at a time."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def accumulate(query, keys, values, valid, scale, best, total, output, PRECISION: tl.constexpr):
    """One tile of online softmax in base 2: the new (best, total, output). Every tile has a valid row."""
    logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * scale
    logits = tl.where(valid, logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    output = output * shrink[:, None]
    output += tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision=PRECISION)
    return new_best, total, output


@triton.jit
def merge_parts(partial_ptr, lse_ptr, first, stride, parts, HEAD_DIM: tl.constexpr, BLOCK_P: tl.constexpr):
    """Attention over all parts of one query: float32 [next power of 2], 0 where no part has rows; and its lse.

    Part p is row first + p * stride of partial results [rows, HEAD_DIM] and log-sum-exps [rows].
    """
    dims = tl.arange(0, columns(HEAD_DIM))
    best = float("-inf")
    total = 0.0
    output = tl.zeros([columns(HEAD_DIM)], tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        at = first + part * stride
        lse = tl.load(lse_ptr + at, mask=part < parts, other=float("-inf"))
        # Parts without rows were never written: their old content must not be read, not even to weigh it with 0.
        written = lse > float("-inf")
        rows_at = at[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_ptr + rows_at, mask=cells(written, HEAD_DIM), other=0.0)
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp(best - anchor)
        weights = tl.exp(lse - anchor)
        total = total * shrink + tl.sum(weights, axis=0)
        output = output * shrink + tl.sum(partial * weights[:, None], axis=0)
        best = new_best
    something = tl.where(total == 0.0, 1.0, total)
    return output / something, tl.where(total == 0.0, float("-inf"), best + tl.log(something))

"""The newest token of a request in a decode step: the CTA that attends to it writes it to the tail.

It is the last row of each head, in the last of the head's parts, which is never empty: that CTA alone takes
the token's key and value from what the model hands over, stores them as the cache holds them, and goes on with what it
has stored, from registers. No other CTA reads this row in this step, so no barrier is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.append import GateInputs
from sgl_ragged.attention.kernels.dims import columns
from sgl_ragged.attention.kernels.gate import gate_score
from sgl_ragged.attention.kernels.pages import page_at
from sgl_ragged.attention.kernels.quantize_fp8 import as_fp8
from sgl_ragged.mem_pool.kv_dtype import KvScales


@dataclass(frozen=True)
class Newest:
    """keys, values: [batch, heads, d] in any floating dtype, a token per request; the token stride may be any. scales
    and gate as `append.append` takes them."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KvScales | None = None
    gate: GateInputs | None = None


@triton.jit
def take_newest(
    keys_ptr,
    values_ptr,
    key_stride,
    value_stride,
    key_reciprocal,
    value_reciprocal,
    tails_at,
    features_ptr,
    output_ptr,
    inputs_ptr,
    pages_at,
    page_units,
    layer,
    request,
    head,
    place,
    feature_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LARGEST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Key and value of a request's token, [BLOCK_M, next power of 2] each, as they are now in the tail: the same in
    every row. Of gates, its score is written, too.

    As many rows as there are queries: they have the layout of these, and are multiplied where they are.

    Args:
        tails_at: where the layer begins in page 0. place: of the token in its segment, whose pages are at `pages_at`.
    """
    cache: tl.constexpr = tails_at.dtype.element_ty
    dims = tl.broadcast_to(tl.arange(0, columns(HEAD_DIM))[None, :], (BLOCK_M, columns(HEAD_DIM)))
    inside = dims < HEAD_DIM
    at = request.to(tl.int64)
    keys = tl.load(keys_ptr + (at * key_stride + head * HEAD_DIM) + dims, mask=inside, other=0.0)
    values = tl.load(values_ptr + (at * value_stride + head * HEAD_DIM) + dims, mask=inside, other=0.0)
    if LARGEST is not None:
        keys = as_fp8(keys, key_reciprocal, cache, LARGEST)
        values = as_fp8(values, value_reciprocal, cache, LARGEST)
    else:
        keys, values = keys.to(cache), values.to(cache)
    page = tl.load(pages_at + place // TOKENS)
    row = head * TOKENS + place % TOKENS
    target = tails_at + (page_at(page, page_units, UNIT) + row * HEAD_DIM) + dims
    once = inside & (tl.arange(0, BLOCK_M) == 0)[:, None]
    tl.store(target, keys, mask=once)
    tl.store(target + HEADS * TOKENS * HEAD_DIM, values, mask=once)
    if features_ptr is not None:
        score = gate_score(features_ptr, output_ptr, at, head, feature_stride, FEATURES)
        # A unit of 16 bytes is four of these.
        tl.store(inputs_ptr + page_at(page, page_units, 4) + layer * HEADS * TOKENS + row, score)
    return keys, values


@triton.jit
def see_newest(query, keys, values, scale, attends, best, total, output):
    """One token more in online softmax in base 2, if `attends`: the new (best, total, output). keys and values as
    `take_newest` gives them."""
    logits = tl.sum(query.to(tl.float32) * keys.to(query.dtype).to(tl.float32), axis=1) * scale
    new_best = tl.where(attends, tl.maximum(best, logits), best)
    # Where nothing is attended to, both are -inf, which must not be subtracted.
    shrink = tl.where(attends, tl.exp2(best - new_best), 1.0)
    weights = tl.where(attends, tl.exp2(logits - new_best), 0.0)
    output = output * shrink[:, None] + weights[:, None] * values.to(query.dtype).to(tl.float32)
    return new_best, total * shrink + weights, output

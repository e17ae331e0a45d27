"""Append: copy tokens of a batch to the tails of their requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.gate import gate_score
from sgl_ragged.attention.kernels.primitives import columns, page_at, page_units, unit
from sgl_ragged.attention.kernels.quantize_fp8 import as_fp8, reciprocals
from sgl_ragged.mem_pool.kv_dtype import KvScales


@dataclass(frozen=True)
class GateInputs:
    """features, output: as `gate.gate_scores` takes them. inputs: float32 [slots, layers, heads, T, 1],
    `Tails.inputs`."""

    features: torch.Tensor
    output: torch.Tensor
    inputs: torch.Tensor


@triton.jit(do_not_specialize=["layer", "feature_stride"])
def append_kernel(
    keys_ptr,
    values_ptr,
    tails_ptr,
    tokens_ptr,
    requests_ptr,
    places_ptr,
    pages_ptr,
    features_ptr,
    output_ptr,
    inputs_ptr,
    key_reciprocal,
    value_reciprocal,
    key_stride,
    value_stride,
    page_units,
    layer_start,
    layer,
    feature_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    copy = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(tokens_ptr + copy).to(tl.int64)
    place = tl.load(places_ptr + copy)
    page = tl.load(pages_ptr + tl.load(requests_ptr + copy) * PAGES + place // TOKENS)
    dims = tl.arange(0, columns(HEAD_DIM))
    inside = dims < HEAD_DIM
    row = head * TOKENS + place % TOKENS
    target = tails_ptr + page_at(page, page_units, UNIT) + layer_start + row * HEAD_DIM + dims
    source = head * HEAD_DIM + dims
    keys = tl.load(keys_ptr + token * key_stride + source, mask=inside)
    values = tl.load(values_ptr + token * value_stride + source, mask=inside)
    if LARGEST is not None:
        keys = as_fp8(keys, key_reciprocal, tails_ptr.dtype.element_ty, LARGEST)
        values = as_fp8(values, value_reciprocal, tails_ptr.dtype.element_ty, LARGEST)
    tl.store(target, keys, mask=inside)
    tl.store(target + HEADS * TOKENS * HEAD_DIM, values, mask=inside)
    if features_ptr is not None:
        score = gate_score(features_ptr, output_ptr, token, head, feature_stride, FEATURES)
        # A unit of 16 bytes is four of these.
        tl.store(inputs_ptr + page_at(page, page_units, 4) + layer * HEADS * TOKENS + row, score)


def append(
    tails: torch.Tensor,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
    requests: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
    scales: KvScales | None = None,
    gate: GateInputs | None = None,
) -> None:
    """Write keys and values of some tokens to tails. Changes `tails` alone.

    Args:
        tails: [slots, layers, 2 (K, V), heads, T, d], `Tails.data`.
        keys, values: [batch tokens, heads, d] in any floating dtype; the token stride may be any.
        tokens, requests, places: int32 [copies]: which token of the batch goes to which place of whose open segment.
        pages: int32 [requests, K], contiguous, those of each request's open segment.
        scales: for FP8 tails, of keys and values that are still to be divided by them; else None.
        gate: inputs of the tokens' scores, stored in pages with keys and values; None if there are none, or if
            another kernel writes them.
    """
    if len(tokens) == 0:
        return
    _, _, _, heads, each, dim = tails.shape
    append_kernel[(len(tokens), heads)](
        keys,
        values,
        tails,
        tokens,
        requests,
        places,
        pages,
        *((gate.features, gate.output, gate.inputs) if gate is not None else (None, None, None)),
        *(reciprocals(scales) if scales is not None else (None, None)),
        keys.stride(0),
        values.stride(0),
        page_units(tails),
        layer * tails.stride(1),
        layer,
        gate.features.stride(0) if gate is not None else 0,
        HEADS=heads,
        TOKENS=each,
        PAGES=pages.shape[1],
        UNIT=unit(tails),
        HEAD_DIM=dim,
        LARGEST=torch.finfo(tails.dtype).max if scales is not None else None,
        FEATURES=gate.output.shape[1] if gate is not None else 0,
        num_warps=1,
    )


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

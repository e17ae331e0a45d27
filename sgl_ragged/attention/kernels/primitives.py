"""Primitives of kernels: head dimensions in tiles, pages of open segments, online softmax and merges of parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def columns(head_dim: int) -> int:
    """Width of a tile: the next power of two.

    Triton's function for it is no longer one for kernels where SGLang has replaced it, as it does without a GPU.
    """
    return 1 << (head_dim - 1).bit_length()


@triton.jit
def cells(rows, HEAD_DIM: tl.constexpr):
    """The mask of a tile, where rows [ROWS] are those that exist: broadcasts to [ROWS, next power of 2]."""
    mask = rows[:, None]
    if columns(HEAD_DIM) > HEAD_DIM:
        mask = mask & (tl.arange(0, columns(HEAD_DIM)) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def cells_until(numbers, end, HEAD_DIM: tl.constexpr):
    """`cells` of the rows whose number is below `end`. In loops: one comparison in place of two spares registers."""
    if columns(HEAD_DIM) > HEAD_DIM:
        ends = tl.where(tl.arange(0, columns(HEAD_DIM)) < HEAD_DIM, end, 0)
        return numbers[:, None] < ends[None, :]
    else:
        return (numbers < end)[:, None]


@triton.jit
def page_at(page, page_units, UNIT: tl.constexpr):
    """Return the first element of pages, int64."""
    return page.to(tl.int64) * (page_units * UNIT)


@triton.jit
def entry_of(number, TOKENS: tl.constexpr):
    """Return the index in the segment's table of the pages of tokens."""
    # Unsigned: a signed division by a constant takes some instructions and registers more.
    return number.to(tl.uint32) // TOKENS


@triton.jit
def row_in_page(number, TOKENS: tl.constexpr):
    """Return the places of tokens of a segment in their pages, int32."""
    return (number.to(tl.uint32) % TOKENS).to(tl.int32)


@triton.jit
def begin_of(pointer, firsts_ptr, segment, first_step, offset, PAGES: tl.constexpr, UNIT: tl.constexpr):
    """Return the start of a finished segment's part at `offset`; in page 0 if it has several (`seal.Source`)."""
    if PAGES == 1:
        pointer += page_at(tl.load(firsts_ptr + segment), first_step, UNIT)
    return pointer + offset


@triton.jit
def row_starts(
    firsts_ptr, segment, token, valid, first_step, stride, TOKENS: tl.constexpr, PAGES: tl.constexpr, UNIT: tl.constexpr
):
    """Return the offsets of tokens of a finished segment from `begin_of`, int64 [rows]."""
    if PAGES == 1:
        # Arithmetic and nothing else, for the sake of chunks: most segments are sealed from there.
        return token.to(tl.int64) * stride
    else:
        page = tl.load(firsts_ptr + segment * PAGES + entry_of(token, TOKENS), mask=valid, other=0)
        return page_at(page, first_step, UNIT) + row_in_page(token, TOKENS) * stride


def unit(tails: torch.Tensor) -> int:
    """Return the number of elements in 16 bytes."""
    return 16 // tails.element_size()


def page_units(tails: torch.Tensor) -> int:
    """Return the distance of pages in units; `tails` as `Tails.data`."""
    units, rest = divmod(tails.stride(0), unit(tails))
    assert rest == 0, "slabs end at multiples of 16 bytes"
    return units


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

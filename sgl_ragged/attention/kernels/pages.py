"""Pages of open segments, as kernels address them.

Token `place` of an open segment is row place % TOKENS of the page at entry place // TOKENS of its table, int32 [PAGES].
TOKENS is in general no power of two, but a constant: the compiler divides by it with a multiplication.

Pages are slabs. How far apart they are divides by 16 bytes, but not always by 16 elements, which is all that Triton
looks for in a number: kernels are given it in units of 16 bytes and multiply, so that rows are known to be aligned.
UNIT is a unit in elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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

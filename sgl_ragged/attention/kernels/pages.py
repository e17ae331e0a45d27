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
    """int64: where pages, as loaded, begin, in elements."""
    return page.to(tl.int64) * (page_units * UNIT)


@triton.jit
def entry_of(number, TOKENS: tl.constexpr):
    """Where in its segment's table the pages of tokens stand."""
    # Unsigned: a signed division by a constant takes some instructions and registers more.
    return number.to(tl.uint32) // TOKENS


@triton.jit
def row_in_page(number, TOKENS: tl.constexpr):
    """int32: the places of tokens of a segment in their pages."""
    return (number.to(tl.uint32) % TOKENS).to(tl.int32)


@triton.jit
def begin_of(pointer, firsts_ptr, segment, first_step, offset, PAGES: tl.constexpr, UNIT: tl.constexpr):
    """Where a finished segment's part at `offset` begins; for one in several pages, in page 0 (`seal.Source`)."""
    if PAGES == 1:
        pointer += page_at(tl.load(firsts_ptr + segment), first_step, UNIT)
    return pointer + offset


@triton.jit
def row_starts(
    firsts_ptr, segment, token, valid, first_step, stride, TOKENS: tl.constexpr, PAGES: tl.constexpr, UNIT: tl.constexpr
):
    """int64 [rows]: where tokens of a finished segment lie, from `begin_of` on."""
    if PAGES == 1:
        # Arithmetic and nothing else, for the sake of chunks: most segments are sealed from there.
        return token.to(tl.int64) * stride
    else:
        page = tl.load(firsts_ptr + segment * PAGES + entry_of(token, TOKENS), mask=valid, other=0)
        return page_at(page, first_step, UNIT) + row_in_page(token, TOKENS) * stride


def unit(tails: torch.Tensor) -> int:
    """Elements of 16 bytes."""
    return 16 // tails.element_size()


def page_units(tails: torch.Tensor) -> int:
    """How far apart pages are, in units; `tails` as `Tails.data`."""
    units, rest = divmod(tails.stride(0), unit(tails))
    assert rest == 0, "slabs end at multiples of 16 bytes"
    return units

"""Describe a decode batch: the segments that each request sees, from SGLang's tables to buffers at fixed addresses.

The only kernel that knows positions; `attention.view.decode_view` is the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.view import DecodeView
from sgl_ragged.mem_pool.tails import NOW

BLOCK_SLOTS = 512
"""Slots that a program looks up at a time."""

_NOW = tl.constexpr(NOW)


# SGLang's rows and lengths may be parts of anything.
@triton.jit(
    do_not_specialize=["token_stride", "page_stride", "view_stride", "slots_stride", "most"],
    do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr"],
)
def describe_kernel(
    req_to_token_ptr,
    rows_ptr,
    lengths_ptr,
    open_pages_ptr,
    in_view_ptr,
    req_pool_indices_ptr,
    pages_ptr,
    open_offsets_ptr,
    open_lengths_ptr,
    slots_ptr,
    seen_ptr,
    token_stride,
    page_stride,
    view_stride,
    slots_stride,
    most,
    SEGMENT: tl.constexpr,
    PAGES: tl.constexpr,
    PADDED_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(lengths_ptr + request).to(tl.int32)
    tokens_at = req_to_token_ptr + row * token_stride
    position = tl.maximum(length - 1, 0)
    number = position // SEGMENT
    offset = position % SEGMENT
    tl.store(req_pool_indices_ptr + request, row)
    tl.store(open_offsets_ptr + request, offset)
    # 0 for padding of no length.
    tl.store(open_lengths_ptr + request, tl.minimum(length, offset + 1))

    own = tl.load(tokens_at + number.to(tl.int64) * SEGMENT) // SEGMENT
    entry = tl.arange(0, PADDED_PAGES)
    # The first page is the segment's own; the last entry of the table is no page of it, but its stage.
    extra_at = open_pages_ptr + row * page_stride + _NOW * PAGES + entry - 1
    extra = tl.load(extra_at, mask=(entry > 0) & (entry < PAGES), other=0)
    tl.store(pages_ptr + request * PAGES + entry, tl.where(entry == 0, own, extra), mask=entry < PAGES)

    seen = number
    if in_view_ptr is not None:
        seen = tl.minimum(number, most)
    tl.store(seen_ptr + request, seen)
    for start in range(0, seen, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < seen
        segment = place
        if in_view_ptr is not None:
            segment = tl.load(in_view_ptr + row * view_stride + place, mask=inside, other=0)
        slots = tl.load(tokens_at + segment.to(tl.int64) * SEGMENT, mask=inside, other=0) // SEGMENT
        tl.store(slots_ptr + request.to(tl.int64) * slots_stride + place, slots, mask=inside)


def describe(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    open_pages: torch.Tensor,
    segment: int,
    out: DecodeView,
    in_view: torch.Tensor | None = None,
) -> DecodeView:
    """Describe a decode batch as `view.decode_view` does, in one launch; only `slots` that count are written.

    Args:
        req_to_token: int32 [rows, context]. rows, lengths: integers [batch].
        open_pages: int32 [rows, 2, K], `Tails.table`.
        in_view: int32 [rows, limit], as there.
    """
    view = out[: len(rows)]
    pages = view.pages.shape[1]
    describe_kernel[(len(rows),)](
        req_to_token,
        rows,
        lengths,
        open_pages,
        in_view,
        view.req_pool_indices,
        view.pages,
        view.open_offsets,
        view.open_lengths,
        view.slots,
        view.seen,
        req_to_token.stride(0),
        open_pages.stride(0),
        0 if in_view is None else in_view.stride(0),
        view.slots.stride(0),
        0 if in_view is None else in_view.shape[1],
        SEGMENT=segment,
        PAGES=pages,
        PADDED_PAGES=triton.next_power_of_2(pages),
        BLOCK=BLOCK_SLOTS,
        num_warps=4,
    )
    return view

"""Describe a decode batch: the segments that each request sees, from SGLang's tables to buffers at fixed addresses.

The only kernel that knows positions; `attention.view.decode_view` is the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.view import DecodeView
from sgl_ragged.mem_pool.tails import BEFORE, NOW

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


BLOCK_SEALS = 128
"""Finished segments that a program looks up."""

_BEFORE = tl.constexpr(BEFORE)


@triton.jit
def _look_up(slots_ptr, requests_ptr, numbers_ptr, out_ptr, at, count, most):
    inside = at < count
    request = tl.load(requests_ptr + at, mask=inside, other=0)
    number = tl.load(numbers_ptr + at, mask=inside, other=0)
    tl.store(out_ptr + at, tl.load(slots_ptr + request * most + number, mask=inside, other=0), mask=inside)


# Counts change from batch to batch, and rows may be a part of anything.
@triton.jit(
    do_not_specialize=["page_stride", "most", "requests", "tail_seals", "chunk_seals"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def describe_chunks_kernel(
    slots_ptr,
    rows_ptr,
    table_ptr,
    before_ptr,
    behind_ptr,
    tail_requests_ptr,
    tail_numbers_ptr,
    chunk_requests_ptr,
    chunk_numbers_ptr,
    open_pages_ptr,
    next_pages_ptr,
    tail_slots_ptr,
    chunk_slots_ptr,
    page_stride,
    most,
    requests,
    tail_seals,
    chunk_seals,
    PAGES: tl.constexpr,
    PADDED_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < requests:
        before, behind = tl.load(before_ptr + program), tl.load(behind_ptr + program)
        finished = before < behind
        table_at = table_ptr + tl.load(rows_ptr + program) * page_stride
        slots_at = slots_ptr + program * most
        entry = tl.arange(0, PADDED_PAGES)
        extra, inside = (entry > 0) & (entry < PAGES), entry < PAGES
        # A request may have none of that number yet.
        own = tl.load(slots_at + before, mask=before < most, other=0)
        # The last entry of the table is the stage.
        own = tl.where(finished, tl.load(table_at + _BEFORE * PAGES + PAGES - 1), own)
        which = tl.where(finished, _BEFORE, _NOW)
        pages = tl.load(table_at + which * PAGES + entry - 1, mask=extra, other=0)
        tl.store(open_pages_ptr + program * PAGES + entry, tl.where(entry == 0, own, pages), mask=inside)
        own = tl.load(slots_at + behind, mask=behind < most, other=0)
        pages = tl.load(table_at + _NOW * PAGES + entry - 1, mask=extra, other=0)
        tl.store(next_pages_ptr + program * PAGES + entry, tl.where(entry == 0, own, pages), mask=inside)
    else:
        at = (program - requests) * BLOCK + tl.arange(0, BLOCK)
        _look_up(slots_ptr, tail_requests_ptr, tail_numbers_ptr, tail_slots_ptr, at, tail_seals, most)
        _look_up(slots_ptr, chunk_requests_ptr, chunk_numbers_ptr, chunk_slots_ptr, at, chunk_seals, most)


def describe_chunks(
    slots: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    before: torch.Tensor,
    behind: torch.Tensor,
    in_tails: tuple[torch.Tensor, torch.Tensor],
    in_chunks: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up segments as `Operations.look_up` does, in one launch.

    Args:
        slots: int32 [requests, most], contiguous, `ExtendView.pages`. rows: int64 [requests].
        table: int32 [rows, 2, K], `Tails.table`.
        before, behind, in_tails, in_chunks: int32, as there.
    """
    requests, pages = len(rows), table.shape[2]
    open_pages, next_pages = (torch.empty((requests, pages), dtype=torch.int32, device=rows.device) for _ in range(2))
    tail_slots, chunk_slots = (torch.empty_like(numbers) for _, numbers in (in_tails, in_chunks))
    if not requests:
        return open_pages, next_pages, tail_slots, chunk_slots
    most_seals = max(len(tail_slots), len(chunk_slots))
    describe_chunks_kernel[(requests + triton.cdiv(most_seals, BLOCK_SEALS),)](
        slots,
        rows,
        table,
        before,
        behind,
        *in_tails,
        *in_chunks,
        open_pages,
        next_pages,
        tail_slots,
        chunk_slots,
        table.stride(0),
        slots.shape[1],
        requests,
        len(tail_slots),
        len(chunk_slots),
        PAGES=pages,
        PADDED_PAGES=triton.next_power_of_2(pages),
        BLOCK=BLOCK_SEALS,
        num_warps=1,
    )
    return open_pages, next_pages, tail_slots, chunk_slots

"""Describe chunks: pages of open segments of a prefill batch, and slots of segments that it finishes.

`attention.operations.Operations.look_up` is the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.mem_pool.tails import BEFORE, NOW

BLOCK_SEALS = 128
"""Finished segments that a program looks up."""

_BEFORE, _NOW = tl.constexpr(BEFORE), tl.constexpr(NOW)


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

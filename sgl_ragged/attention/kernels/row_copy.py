"""Copies parts of rows between two buffers on a GPU, one of which may be pinned memory of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096
"""Words of 4 bytes that a program copies: 16 KiB."""


@triton.jit
def copy_rows_kernel(
    source_ptr,
    target_ptr,
    source_rows_ptr,
    target_rows_ptr,
    source_stride,
    target_stride,
    source_start,
    target_start,
    words,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < words
    source_row = tl.load(source_rows_ptr + pair).to(tl.int64)
    target_row = tl.load(target_rows_ptr + pair).to(tl.int64)
    value = tl.load(source_ptr + source_row * source_stride + source_start + place, mask=inside)
    tl.store(target_ptr + target_row * target_stride + target_start + place, value, mask=inside)


def copy_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor,
    target_rows: torch.Tensor,
    source_bytes: tuple[int, int],
    target_first_byte: int,
) -> None:
    """Copy bytes of rows; waits for nothing.

    Args:
        source, target: [rows, ...], contiguous, rows a multiple of 4 bytes; on the GPU or in pinned memory.
        source_rows, target_rows: integers [pairs], on the GPU.
        source_bytes: first byte and the one behind the last in each source row, multiples of 4.
        target_first_byte: where they go in each target row, a multiple of 4.
    """
    words = (source_bytes[1] - source_bytes[0]) // 4
    if not words or not len(source_rows):
        return
    source_words, target_words = (buffer.view(torch.uint8).view(torch.int32) for buffer in (source, target))
    copy_rows_kernel[(len(source_rows), triton.cdiv(words, BLOCK_WORDS))](
        source_words,
        target_words,
        source_rows,
        target_rows,
        source_words.stride(0),
        target_words.stride(0),
        source_bytes[0] // 4,
        target_first_byte // 4,
        words,
        BLOCK=BLOCK_WORDS,
    )

"""Copies parts of rows between two buffers on a GPU, one of which may be pinned memory of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096
"""Words of 4 bytes that a program copies: 16 KiB."""


@triton.jit
def copy_rows_kernel(
    source,
    target,
    source_rows,
    target_rows,
    source_stride,
    target_stride,
    source_first,
    target_first,
    words,
    BLOCK: tl.constexpr,
):
    """target[target_rows[p], target_first:][:words] = source[source_rows[p], source_first:][:words], in words."""
    pair = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < words
    from_row = tl.load(source_rows + pair).to(tl.int64)
    to_row = tl.load(target_rows + pair).to(tl.int64)
    value = tl.load(source + from_row * source_stride + source_first + place, mask=inside)
    tl.store(target + to_row * target_stride + target_first + place, value, mask=inside)


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

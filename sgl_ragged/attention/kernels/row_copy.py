"""Copy parts of rows between two buffers on a GPU, one of which may be pinned memory of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096
"""Words of 4 bytes that a program copies at a time: 16 KiB."""

PROGRAMS = 8
"""Most programs of a copy, whatever its size: the link to the host is the limit, and the rest of the GPU is for forward
passes meanwhile. SGLang's own copies take two blocks of more threads. An estimate, not measured."""

UNITS = (4, 1)
"""Words that starts and lengths are multiples of: of 16 bytes, so that as many are moved at a time, or of 4."""


@triton.jit(
    do_not_specialize=["source_stride", "target_stride", "source_start", "target_start", "length", "pairs"],
    do_not_specialize_on_alignment=["source_rows_ptr", "target_rows_ptr"],
)
def copy_rows_kernel(
    source_ptr,
    target_ptr,
    source_rows_ptr,
    target_rows_ptr,
    source_stride,
    target_stride,
    source_start,
    target_start,
    length,
    pairs,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    words = length * UNIT
    blocks = tl.cdiv(words, BLOCK)
    for number in range(tl.program_id(0), pairs * blocks, tl.num_programs(0)):
        pair = number // blocks
        place = number % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = place < words
        source_row = tl.load(source_rows_ptr + pair).to(tl.int64) * source_stride + source_start
        target_row = tl.load(target_rows_ptr + pair).to(tl.int64) * target_stride + target_start
        value = tl.load(source_ptr + source_row * UNIT + place, mask=inside)
        tl.store(target_ptr + target_row * UNIT + place, value, mask=inside)


def copy_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor,
    target_rows: torch.Tensor,
    source_bytes: tuple[int, int],
    target_first_byte: int,
    programs: int | None = None,
) -> None:
    """Copy bytes of rows; waits for nothing.

    Args:
        source, target: [rows, ...], contiguous, rows a multiple of 4 bytes; on the GPU or in pinned memory.
        source_rows, target_rows: int64 [pairs], on the GPU.
        source_bytes: [first, end) bytes in each source row, multiples of 4.
        target_first_byte: where they go in each target row, a multiple of 4.
        programs: at most; PROGRAMS by default.
    """
    words, pairs = (source_bytes[1] - source_bytes[0]) // 4, len(source_rows)
    if not words or not pairs:
        return
    source_words, target_words = (buffer.view(torch.uint8).view(torch.int32) for buffer in (source, target))
    numbers = (source_words.stride(0), target_words.stride(0), source_bytes[0] // 4, target_first_byte // 4, words)
    unit = next(unit for unit in UNITS if not any(number % unit for number in numbers))
    copy_rows_kernel[(min(pairs * triton.cdiv(words, BLOCK_WORDS), programs or PROGRAMS),)](
        source_words,
        target_words,
        source_rows,
        target_rows,
        *(number // unit for number in numbers),
        pairs,
        UNIT=unit,
        BLOCK=BLOCK_WORDS,
        num_warps=8,
    )


def warm_up(device: torch.device) -> None:
    """Compile every variant of the kernel by copies of 0 rows."""
    words, rows = torch.zeros(4, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for unit in UNITS:
        copy_rows_kernel[(1,)](words, words, rows, rows, 1, 1, 0, 0, 0, 0, UNIT=unit, BLOCK=BLOCK_WORDS, num_warps=8)

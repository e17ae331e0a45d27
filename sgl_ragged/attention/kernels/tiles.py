"""Tile shapes: the part of the work that a CTA holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.slab_format import PLANES, WIDE, SlabFormat

HEAD_DIM_STEP, MOST_HEAD_DIM = 16, 256
"""Head dimensions are multiples of the one, for rows that are aligned, up to the other."""

MOST_Q_PER_KV = 16


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys that a CTA works on, its warps, and the depth of its software pipeline.

    `precision` is what tl.dot does with float32: three TF32 products, which agree with float32 to about 1e-6, or plain
    float32 arithmetic, which is slower and takes fewer registers. Other dtypes do not look at it. `registers`: the most
    per thread, where the compiler is to be told: it may else spill to make room for more CTAs than shared memory does.

    The figures are those that spill on none of the architectures and leave the loads pipelined
    (`benchmarks/kernel_resources.py`).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int = 3
    precision: str = "tf32x3"
    registers: int | None = None


def decode_tile(head_dim: int, itemsize: int, *, fp8: bool = False, form: SlabFormat = WIDE) -> Tile:
    """The tile of the decode kernel; 16 query rows, the fewest that a tensor core takes.

    Args:
        itemsize: bytes per element of the queries, whose dtype keys and values are brought to.
        fp8: whether slabs are.
        form: of slabs; where keys are centred, tiles are of one segment.
    """
    if form.centred and itemsize == 2:
        if head_dim > 128:
            return Tile(16, 16, 8)
        if head_dim <= 64:
            return Tile(16, 32, 4, registers=128)
        return Tile(16, 32, 4, registers=168 if form.key_bits == 4 and head_dim <= 80 else 255)
    if itemsize == 4:
        if head_dim <= 64:
            return Tile(16, 16, 4, registers=136)
        return Tile(16, 32, 4) if head_dim <= 128 else Tile(16, 16, 8)
    if head_dim > 128:
        return Tile(16, 32, 8, registers=168 if fp8 else None)
    # Shared memory has room for three of these at most, and 168 registers are a third of all.
    wide = head_dim > 64 and not fp8 and not form.quantised
    if form.quantised and head_dim <= 64:
        return Tile(16, 32, 4, registers=96)
    return Tile(16, 64, 4, registers=168 if wide else None)


def extend_tile(head_dim: int, itemsize: int, architecture: int, *, fp8: bool = False, form: SlabFormat = WIDE) -> Tile:
    """The tile of the extend kernel; query rows are (token, query head) pairs.

    Args:
        architecture: compute capability, major number: from 9 on the accumulators need fewer registers.
        fp8: whether slabs are, which before 9 takes registers to convert.
        form: of slabs; codes take registers, too, and from 10 on where rows are narrower than tiles.
    """
    if itemsize == 4:
        if head_dim <= 64:
            return Tile(32, 16, 4)
        return Tile(32, 16, 8) if head_dim <= 128 else Tile(16, 16, 4, precision="ieee")
    if form.centred:
        if head_dim > 128:
            # Values in two planes take registers, too: three stages would spill there, and two are not pipelined.
            return Tile(16, 16, 8, stages=2 if architecture < 9 and len(PLANES[form.value_bits]) > 1 else 3)
        if form.key_bits == 6 and architecture >= 10 and head_dim % 32:
            return Tile(32, 32, 8)
        return Tile(64, 32, 8) if architecture >= 9 or head_dim <= 64 else Tile(32, 32, 8)
    if form.quantised and architecture < 9 and head_dim > 64:
        return Tile(32, 32, 4) if head_dim <= 128 else Tile(16, 16, 8)
    if form.quantised and architecture >= 10 and 64 < head_dim < 128:
        return Tile(128, 32, 8)
    if fp8 and architecture < 9 and head_dim > 64:
        return Tile(64, 32 if head_dim <= 128 else 16, 8)
    if head_dim <= 128:
        return Tile(128, 64 if architecture >= 9 or head_dim <= 64 else 32, 8)
    return Tile(64, 32, 8)


def check_shape(head_dim: int, q_per_kv: int) -> None:
    """Raise RaggedConfigError for heads that the Triton kernels cannot take."""
    if head_dim not in range(HEAD_DIM_STEP, MOST_HEAD_DIM + 1, HEAD_DIM_STEP) or not 1 <= q_per_kv <= MOST_Q_PER_KV:
        raise RaggedConfigError(
            f"the Triton kernels take head dimensions up to {MOST_HEAD_DIM} that divide by {HEAD_DIM_STEP} and up to "
            f"{MOST_Q_PER_KV} query heads per KV head, not {head_dim} and {q_per_kv}; use --ragged-kernel torch"
        )

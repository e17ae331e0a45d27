"""Seal: score finished segments, choose what each head keeps, write it to the slabs.

Segments come from pages of the pool or from a chunk (`Source`). "Heads" may be those of one layer, or of all layers at
once: then one launch of each kernel seals what a decode step has filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import quantised, store_row_codes
from sgl_ragged.attention.kernels.primitives import begin_of, cells, columns, page_units, row_starts, unit
from sgl_ragged.attention.kernels.row_moments import centred, scales_at, write_moments
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from sgl_ragged.profiles.budgets import GUARD, SINKS

SCORED = ("keydiff", "key_norm", "value_key_norm")
"""Scorers that `score` computes; the formulas and their sources are in `sgl_ragged.scorers`."""

GATHER_ROWS = 32
"""Rows that one CTA of `gather` copies."""

CODED_ROWS = 16
"""Rows that one CTA of `gather` rounds to codes."""

_GUARD = tl.constexpr(GUARD)
_SINKS = tl.constexpr(SINKS)


@dataclass(frozen=True)
class Source:
    """Place of finished segments; all numbers are elements of `keys` and `values`.

    A segment is stored in K pages of `tokens` tokens each, or, as in a chunk, in one piece, at `firsts`, int32
    [segments, K], contiguous. Key element (segment, head, token, i) is at firsts[segment, token // tokens] * unit *
    key_first_step + head // heads * layer_stride + head % heads * head_stride + token % tokens * key_stride + i, where
    `heads` counts the heads of one layer; values likewise. `num_heads` counts the heads of all layers that are sealed.
    """

    keys: torch.Tensor
    values: torch.Tensor
    firsts: torch.Tensor
    unit: int
    key_first_step: int
    value_first_step: int
    key_stride: int
    value_stride: int
    layer_stride: int
    head_stride: int
    heads: int
    num_heads: int
    tokens: int

    @staticmethod
    def of_tails(tails: torch.Tensor, pages: torch.Tensor, layer: int | None) -> Source:
        """Full open segments with these pages, int32 [segments, K], of one layer or of all (None).

        tails: [slots, layers, 2 (K, V), heads, T, d], `Tails.data`.
        """
        _, layers, _, heads, each, dim = tails.shape
        start = 0 if layer is None else layer
        step, layer_stride = page_units(tails), tails.stride(1)
        count = heads if layer is not None else layers * heads
        keys, values = tails[:, start, 0], tails[:, start, 1]
        strides = step, step, dim, dim, layer_stride, each * dim
        return Source(keys, values, pages.contiguous(), unit(tails), *strides, heads, count, each)

    @staticmethod
    def of_chunk(keys: torch.Tensor, values: torch.Tensor, first_tokens: torch.Tensor) -> Source:
        """Segments of a chunk's keys and values [tokens, heads, d] that start at some of its tokens."""
        _, heads, dim = keys.shape
        key, value = keys.stride(0), values.stride(0)
        return Source(keys, values, first_tokens[:, None], 1, key, value, key, value, 0, dim, heads, heads, 0)

    @staticmethod
    def of_rows(rows: torch.Tensor, heads: int, numbers: torch.Tensor) -> Source:
        """Segments whose keys and values are one tensor [segments, heads of all layers, 2 (K, V), S, d], contiguous.
        heads: of one layer. numbers: int32 [segments], 0, 1, .."""
        _, count, _, length, dim = rows.shape
        head = 2 * length * dim
        strides = count * head, count * head, dim, dim, heads * head, head
        return Source(rows[:, :, 0], rows[:, :, 1], numbers[:, None], 1, *strides, heads, count, 0)

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants that kernels take."""
        return dict(HEADS=self.heads, TOKENS=self.tokens, PAGES=self.firsts.shape[1], UNIT=self.unit)


@triton.jit
def _rows(pointer, at, valid, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, columns(HEAD_DIM))
    return tl.load(pointer + at[:, None] + dims[None, :], mask=cells(valid, HEAD_DIM), other=0.0)


@triton.jit
def score_kernel(
    keys_ptr,
    values_ptr,
    firsts_ptr,
    scores_ptr,
    key_first_step,
    value_first_step,
    key_stride,
    value_stride,
    layer_stride,
    head_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    SCORER: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    segment = tl.program_id(0)
    head = tl.program_id(1)
    offset = head // HEADS * layer_stride + head % HEADS * head_stride
    keys_at = begin_of(keys_ptr, firsts_ptr, segment, key_first_step, offset, PAGES, UNIT)
    values_at = begin_of(values_ptr, firsts_ptr, segment, value_first_step, offset, PAGES, UNIT)
    scores_at = scores_ptr + (segment * tl.num_programs(1) + head) * SEGMENT
    tokens = tl.arange(0, BLOCK_T)

    anchor = tl.zeros([columns(HEAD_DIM)], tl.float32)
    if SCORER == "keydiff":
        for start in range(0, SEGMENT, BLOCK_T):
            token = start + tokens
            inside = token < SEGMENT
            at = row_starts(firsts_ptr, segment, token, inside, key_first_step, key_stride, TOKENS, PAGES, UNIT)
            keys = _rows(keys_at, at, inside, HEAD_DIM).to(tl.float32)
            norm = tl.sqrt(tl.sum(keys * keys, axis=1))
            anchor += tl.sum(keys / tl.maximum(norm, 1e-12)[:, None], axis=0)
        anchor = anchor / SEGMENT
        anchor = anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, axis=0)), 1e-12)

    for start in range(0, SEGMENT, BLOCK_T):
        token = start + tokens
        inside = token < SEGMENT
        at = row_starts(firsts_ptr, segment, token, inside, key_first_step, key_stride, TOKENS, PAGES, UNIT)
        keys = _rows(keys_at, at, inside, HEAD_DIM).to(tl.float32)
        norm = tl.sqrt(tl.sum(keys * keys, axis=1))
        if SCORER == "keydiff":
            score = -tl.sum(keys / tl.maximum(norm, 1e-12)[:, None] * anchor[None, :], axis=1)
        elif SCORER == "key_norm":
            score = -norm
        else:
            at = row_starts(firsts_ptr, segment, token, inside, value_first_step, value_stride, TOKENS, PAGES, UNIT)
            values = _rows(values_at, at, inside, HEAD_DIM).to(tl.float32)
            score = tl.sqrt(tl.sum(values * values, axis=1)) / tl.maximum(norm, 1.1754943508222875e-38)
        tl.store(scores_at + token, score, mask=inside)


@triton.jit
def choose_kernel(
    scores_ptr,
    numbers_ptr,
    kept_ptr,
    positions_ptr,
    SEGMENT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    segment = tl.program_id(0)
    head = tl.program_id(1)
    at = (segment * tl.num_programs(1) + head) * SEGMENT
    starts_sequence = tl.load(numbers_ptr + segment) == 0
    kept = tl.load(kept_ptr + head)

    # A token's rank is the number of tokens that go before it. What is kept whatever its score has a class above all
    # the rest: sinks first, then the guard from its end, so that it gives way, oldest token first.
    token = tl.arange(0, PADDED)
    score = _defined(tl.load(scores_ptr + at + token, mask=token < SEGMENT, other=float("-inf")))
    forced = _forced(token, starts_sequence, SEGMENT)
    rank = tl.zeros([PADDED], tl.int32)
    for start in range(0, SEGMENT, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        other_score = _defined(tl.load(scores_ptr + at + other, mask=other < SEGMENT, other=float("-inf")))
        other_forced = tl.where(other < SEGMENT, _forced(other, starts_sequence, SEGMENT), -1)
        same = other_forced[None, :] == forced[:, None]
        tied = same & (other_score[None, :] == score[:, None]) & (other[None, :] < token[:, None])
        above = other_forced[None, :] > forced[:, None]
        above = above | (same & (other_score[None, :] > score[:, None])) | tied
        rank += tl.sum(above.to(tl.int32), axis=1)
    keep = (rank < kept) & (token < SEGMENT)
    before = tl.cumsum(keep.to(tl.int32), axis=0)
    place = tl.where(keep, before - 1, tl.minimum(kept, SEGMENT) + token - before)
    tl.store(positions_ptr + at + place, token, mask=token < SEGMENT)


@triton.jit
def _defined(score):
    """Order scores as `scorers.forced_first` does: infinities become the largest finite numbers, NaN is lowest."""
    bounded = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
    return tl.where(score == score, bounded, float("-inf"))


@triton.jit
def _forced(token, starts_sequence, SEGMENT: tl.constexpr):
    guard = tl.where(token >= SEGMENT - _GUARD, token + 1, 0)
    return tl.where((token < _SINKS) & starts_sequence, SEGMENT + 1, guard)


@triton.jit
def gather_kernel(
    keys_ptr,
    values_ptr,
    firsts_ptr,
    slabs_ptr,
    slots_ptr,
    positions_ptr,
    kept_ptr,
    key_blocks_ptr,
    key_first_step,
    value_first_step,
    key_stride,
    value_stride,
    layer_stride,
    head_stride,
    slab_elems,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    segment = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    kept = tl.load(kept_ptr + head)
    inside = row < kept
    chosen_at = positions_ptr + (segment * tl.num_programs(1) + head) * SEGMENT
    token = tl.load(chosen_at + row, mask=inside, other=0)
    offset = head // HEADS * layer_stride + head % HEADS * head_stride
    keys_at = begin_of(keys_ptr, firsts_ptr, segment, key_first_step, offset, PAGES, UNIT)
    values_at = begin_of(values_ptr, firsts_ptr, segment, value_first_step, offset, PAGES, UNIT)
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    target = slabs_ptr + slot * slab_elems + tl.load(key_blocks_ptr + head) * 16
    at = row_starts(firsts_ptr, segment, token, inside, key_first_step, key_stride, TOKENS, PAGES, UNIT)
    keys = _rows(keys_at, at, inside, HEAD_DIM)
    at = row_starts(firsts_ptr, segment, token, inside, value_first_step, value_stride, TOKENS, PAGES, UNIT)
    values = _rows(values_at, at, inside, HEAD_DIM)
    if KEY_BITS == 0:
        dims = tl.arange(0, columns(HEAD_DIM))
        rows_at = row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target + rows_at, keys, mask=cells(inside, HEAD_DIM))
        tl.store(target + kept * HEAD_DIM + rows_at, values, mask=cells(inside, HEAD_DIM))
    else:
        scale_at = scales_at(target, row, kept, HEAD_DIM * (KEY_BITS + VALUE_BITS) // 8)
        if CENTRED:
            keys, sign = centred(keys, target, scale_at, inside, BLOCK_R, HEAD_DIM)
        codes, key_scales = quantised(keys, KEY_BITS, BLOCK_R, HEAD_DIM)
        if CENTRED:
            key_scales = tl.where(sign > 0, key_scales, -key_scales)
        store_row_codes(target, codes, row, inside, kept, KEY_BITS, BLOCK_R, HEAD_DIM)
        target += kept * (HEAD_DIM * KEY_BITS // 8)
        codes, value_scales = quantised(values, VALUE_BITS, BLOCK_R, HEAD_DIM)
        store_row_codes(target, codes, row, inside, kept, VALUE_BITS, BLOCK_R, HEAD_DIM)
        tl.store(scale_at, key_scales, mask=inside)
        tl.store(scale_at + 1, value_scales, mask=inside)


def gather_rows(form: SlabFormat) -> int:
    """Rows that one CTA of `gather` writes."""
    return CODED_ROWS if form.quantised else GATHER_ROWS


def gather_registers(form: SlabFormat, head_dim: int) -> int | None:
    """The most registers per thread of `gather`, where the compiler is to be told (`tiles.Tile`)."""
    return 168 if form.quantised and head_dim <= 128 else None


def score_block(head_dim: int) -> int:
    """Tokens that `score` holds at a time."""
    return 32 if head_dim <= 128 else 16


def score(source: Source, scorer: str, segment: int, head_dim: int) -> torch.Tensor:
    """Scores of finished segments by one of SCORED: float32 [segments, heads, S]. Higher is kept first."""
    shape = (len(source.firsts), source.num_heads, segment)
    scores = torch.empty(shape, dtype=torch.float32, device=source.keys.device)
    score_kernel[scores.shape[:2]](
        source.keys,
        source.values,
        source.firsts,
        scores,
        source.key_first_step,
        source.value_first_step,
        source.key_stride,
        source.value_stride,
        source.layer_stride,
        source.head_stride,
        **source.constants,
        SCORER=scorer,
        SEGMENT=segment,
        HEAD_DIM=head_dim,
        BLOCK_T=score_block(head_dim),
        num_warps=4,
    )
    return scores


def choose(scores: torch.Tensor, numbers: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Positions that each head keeps, as `scorers.rank_positions` and `keep_positions` choose them.

    Args:
        scores: float32 [segments, heads, S], contiguous.
        numbers: int32 [segments], the segments' numbers in their sequences: the first, 0, holds the sinks.
        kept: int32 [heads].

    Returns:
        int32 [segments, heads, S]: the kept positions, kept[head] of them, then the dropped ones; both
        ascending.
    """
    segments, heads, segment = scores.shape
    positions = torch.empty((segments, heads, segment), dtype=torch.int32, device=scores.device)
    padded = triton.next_power_of_2(segment)
    choose_kernel[(segments, heads)](
        scores,
        numbers,
        kept,
        positions,
        SEGMENT=segment,
        PADDED=padded,
        BLOCK_J=max(min(8192 // padded, 32), 1),
        num_warps=4,
    )
    return positions


def gather(
    source: Source,
    slabs: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    most_kept: int,
    head_dim: int,
    form: SlabFormat = WIDE,
) -> None:
    """Copy the chosen rows of each segment to its slab, or their codes. Changes `slabs` alone.

    Args:
        slots: integers [segments]. form: of the slabs, bytes if it is quantised.
        positions: from `choose`.
        kept: int32 [heads]. key_blocks: int64 [heads], where a head's keys start in a slab, in blocks of 16 elements.
        most_kept: the largest of `kept`, known to the host.
    """
    segments, heads, segment = positions.shape
    rows = gather_rows(form)
    if form.centred:
        write_moments(source, slabs, slots, positions, kept, key_blocks, head_dim, form)
    gather_kernel[(segments, heads, triton.cdiv(most_kept, rows))](
        source.keys,
        source.values,
        source.firsts,
        slabs,
        slots,
        positions,
        kept,
        key_blocks,
        source.key_first_step,
        source.value_first_step,
        source.key_stride,
        source.value_stride,
        source.layer_stride,
        source.head_stride,
        slabs.stride(0),
        **source.constants,
        SEGMENT=segment,
        HEAD_DIM=head_dim,
        BLOCK_R=rows,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        CENTRED=form.centred,
        num_warps=4,
        maxnreg=gather_registers(form, head_dim),
    )


def ordered_rows(
    source: Source,
    positions: torch.Tensor,
    numbers: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    head_dim: int,
) -> torch.Tensor:
    """Keys and values of whole segments in another order: [segments, heads, 2 (K, V), S, d].

    Args:
        positions: from `choose`. numbers: int32 [segments], 0, 1, ..
        kept, key_blocks: as in `gather`, where every head keeps all.
    """
    segments, heads, segment = positions.shape
    rows = torch.empty((segments, heads, 2, segment, head_dim), dtype=source.keys.dtype, device=positions.device)
    gather(source, rows.flatten(1), numbers, positions, kept, key_blocks, segment, head_dim)
    return rows

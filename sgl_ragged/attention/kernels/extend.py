"""Extend: a chunk's queries over earlier segments as they were kept, and over their own segment causally.

One launch takes any number of requests and segments. Its unit is a tile of rows, pairs of (token, query head), that lie
in one segment of one request: they all see the same earlier segments. What they see comes from three places: slabs,
the tail (tokens of their segment that came before the chunk) and the chunk itself.

A short chunk after a long history has fewer tiles than the GPU has room for. Then the history of each head is divided
by a CTA map, as in decode, and a second launch merges the parts; the last part has the tail and the chunk, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.attend import attend_slabs, attend_tail
from sgl_ragged.attention.kernels.primitives import (
    COMBINED_PARTS,
    LN2,
    LOG2E,
    accumulate,
    cells,
    cells_until,
    columns,
    merge_parts,
    page_units,
    unit,
)
from sgl_ragged.attention.kernels.tiles import Tile
from sgl_ragged.attention.view import TILE_COLUMNS
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat

_COLUMNS = tl.constexpr(len(TILE_COLUMNS))


# Triton compiles another variant for a number that divides by 16: this one changes from batch to batch.
@triton.jit(do_not_specialize=["slots_stride"])
def extend_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    slabs_ptr,
    tails_ptr,
    slots_ptr,
    pages_ptr,
    tiles_ptr,
    ctas_ptr,
    kept_ptr,
    key_blocks_ptr,
    opens_ptr,
    output_ptr,
    head_lse_ptr,
    sinks_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    value_scale,
    query_stride,
    key_stride,
    value_stride,
    slab_elems,
    slots_stride,
    page_units,
    layer_start,
    HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
    PARTIAL: tl.constexpr,
    LSE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    table = tiles_ptr + tl.program_id(0) * _COLUMNS
    request = tl.load(table)
    first_token = tl.load(table + 1)
    tokens = tl.load(table + 2)
    first_row = tl.load(table + 3)
    seen_segments = tl.load(table + 4)
    open_length = tl.load(table + 5)
    listed = tl.load(table + 6)
    cta = ctas_ptr + tl.program_id(1) * 4
    head = tl.load(cta)
    part = tl.load(cta + 1)
    parts = tl.load(cta + 2)
    kept = tl.load(kept_ptr + head)

    dims = tl.arange(0, columns(HEAD_DIM))
    tile_rows = tl.arange(0, BLOCK_N)
    pair = first_row + tl.arange(0, BLOCK_M)
    token = pair // Q_PER_KV
    inside = token < tokens
    query_head = head * Q_PER_KV + pair % Q_PER_KV
    query_at = (first_token + token).to(tl.int64) * query_stride + query_head * HEAD_DIM
    query = tl.load(queries_ptr + query_at[:, None] + dims[None, :], mask=cells(inside, HEAD_DIM), other=0.0)
    scale2 = scale * LOG2E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, columns(HEAD_DIM)], tl.float32)

    history = seen_segments * kept
    begin, end = 0, history
    if DIVIDED:
        begin = history // 16 * part // parts * 16
        end = history // 16 * (part + 1) // parts * 16
    best, total, output = attend_slabs(
        query,
        best,
        total,
        output,
        slabs_ptr,
        slots_ptr + listed * slots_stride,
        key_blocks_ptr + head,
        slab_elems,
        kept,
        begin,
        end,
        scale2,
        KEY_BITS,
        VALUE_BITS,
        CENTRED,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        STAGES,
        PRECISION,
        PARTIAL,
    )

    # Rows beyond the part see its first token, so that every row of every tile has something valid to look at.
    seen = tl.minimum((first_row + BLOCK_M - 1) // Q_PER_KV + 1, tokens)
    if PARTIAL:
        opens = tl.load(opens_ptr + head)
        open_length *= opens
        seen *= opens
    if DIVIDED:
        open_length = tl.where(part == parts - 1, open_length, 0)
        seen = tl.where(part == parts - 1, seen, 0)

    best, total, output = attend_tail(
        query,
        best,
        total,
        output,
        tails_ptr + layer_start + head * TOKENS * HEAD_DIM,
        pages_ptr + request * PAGES,
        page_units,
        HEADS * TOKENS * HEAD_DIM,
        0,
        open_length,
        scale2,
        TOKENS,
        PAGES,
        UNIT,
        HEAD_DIM,
        BLOCK_N,
        STAGES,
        PRECISION,
    )

    for start in tl.range(0, seen, BLOCK_N, num_stages=STAGES):
        number = start + tile_rows
        valid = number < seen
        chunk_at = (first_token + number).to(tl.int64)
        keys = tl.load(
            keys_ptr + (chunk_at * key_stride + head * HEAD_DIM)[:, None] + dims[None, :],
            mask=cells_until(number, seen, HEAD_DIM),
            other=0.0,
        )
        values = tl.load(
            values_ptr + (chunk_at * value_stride + head * HEAD_DIM)[:, None] + dims[None, :],
            mask=cells_until(number, seen, HEAD_DIM),
            other=0.0,
        )
        causal = valid[None, :] & (number[None, :] <= token[:, None])
        best, total, output = accumulate(query, keys, values, causal, scale2, best, total, output, PRECISION)

    if LSE and not DIVIDED:
        head_lse = (best + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN2
        head_lse_at = (first_token + token).to(tl.int64) * (HEADS * Q_PER_KV) + query_head
        tl.store(head_lse_ptr + head_lse_at, head_lse, mask=inside)
        total = tl.where(total == 0.0, 1.0, total)
    if sinks_ptr is not None and not DIVIDED:
        # A logit more, which has no value.
        sinks = tl.load(sinks_ptr + query_head, mask=inside, other=0.0).to(tl.float32)
        total += tl.exp2(sinks * LOG2E - best)
    output = output / total[:, None]
    if value_scale is not None:
        output *= value_scale
    if DIVIDED:
        place = (tl.program_id(0) * tl.num_programs(1) + tl.load(cta + 3)) * BLOCK_M + tl.arange(0, BLOCK_M)
        # A part without rows leaves -inf, and something that is not read.
        tl.store(lse_ptr + place, (best + tl.log2(total)) * LN2)
        partial_pointers = partial_ptr + place[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
        tl.store(partial_pointers, output, mask=dims[None, :] < HEAD_DIM)
    else:
        output_at = (first_token + token).to(tl.int64) * (HEADS * Q_PER_KV * HEAD_DIM) + query_head * HEAD_DIM
        output_pointers = output_ptr + output_at[:, None] + dims[None, :]
        tl.store(output_pointers, output.to(output_ptr.dtype.element_ty), mask=cells(inside, HEAD_DIM))


@triton.jit(do_not_specialize=["num_ctas"])
def combine_tiles_kernel(
    partial_ptr,
    lse_ptr,
    parts_ptr,
    tiles_ptr,
    output_ptr,
    head_lse_ptr,
    sinks_ptr,
    num_ctas,
    HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LSE: tl.constexpr,
):
    table = tiles_ptr + tl.program_id(0) * _COLUMNS
    head = tl.program_id(1)
    row = tl.program_id(2)
    pair = tl.load(table + 3) + row
    token = pair // Q_PER_KV
    if token >= tl.load(table + 2):
        return
    place = tl.program_id(0) * num_ctas + tl.load(parts_ptr + head * 2)
    parts = tl.load(parts_ptr + head * 2 + 1)
    output, head_lse = merge_parts(partial_ptr, lse_ptr, place * BLOCK_M + row, BLOCK_M, parts, HEAD_DIM, BLOCK_P)
    query_head = head * Q_PER_KV + pair % Q_PER_KV
    if LSE:
        tl.store(head_lse_ptr + (tl.load(table + 1) + token).to(tl.int64) * (HEADS * Q_PER_KV) + query_head, head_lse)
    if sinks_ptr is not None:
        # As `attention.sinks.with_sinks`.
        output *= tl.sigmoid(head_lse - tl.load(sinks_ptr + query_head).to(tl.float32))
    output_at = (tl.load(table + 1) + token).to(tl.int64) * (HEADS * Q_PER_KV * HEAD_DIM) + query_head * HEAD_DIM
    dims = tl.arange(0, columns(HEAD_DIM))
    tl.store(output_ptr + output_at + dims, output.to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def extend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slabs: torch.Tensor,
    tails: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    pages: torch.Tensor,
    tiles: torch.Tensor,
    ctas: torch.Tensor,
    parts: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    scale: float,
    value_scale: float | None,
    output: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile,
    opens: torch.Tensor | None = None,
    head_lse: torch.Tensor | None = None,
    form: SlabFormat = WIDE,
    sinks: torch.Tensor | None = None,
) -> object:
    """Attention of a chunk. Changes `output` and `head_lse` alone; every token of the batch must be in a tile.

    Args:
        queries: [tokens, heads, q_per_kv, d]. keys, values: [tokens, heads, d], as the cache holds them. Token strides
            may be any.
        slabs, tails, kept, key_blocks, scale, value_scale, form: as in `decode.decode_parts`.
        slots: int32 [lists, most], the lists of slots that tiles see.
        pages: int32 [requests, K], contiguous, of the segments that are open before each chunk.
        tiles: int32 [tiles, len(TILE_COLUMNS)], `view.ExtendView.tiles`.
        ctas: int32 [CTAs, 4], `cta_map.cta_table`. parts: int32 [heads, 2], `cta_map.head_parts`.
        output: [tokens, heads, q_per_kv, d], contiguous.
        scratch: where some head has several parts, float32 of at least [tiles, CTAs, block_m, d] and
            [tiles, CTAs, block_m] elements, which are overwritten; None where each head is one CTA.
        opens: as in `decode.decode_parts`.
        head_lse: float32 [tokens, heads, q_per_kv], contiguous, for natural log-sum-exps, -inf where a head attends to
            nothing (its output is 0), without sinks; None if heads are whole and log-sum-exps are not needed.
        sinks: [heads * q_per_kv] in any floating dtype, contiguous: learned sinks, or None.

    Returns:
        The compiled kernel; None in the interpreter.
    """
    _, num_heads, per_head, dim = queries.shape
    partial, lse = scratch or (output, output)
    kernel = extend_kernel[(len(tiles), len(ctas))](
        queries,
        keys,
        values,
        slabs,
        tails,
        slots,
        pages,
        tiles,
        ctas,
        kept,
        key_blocks,
        opens,
        output,
        head_lse,
        sinks,
        partial,
        lse,
        scale,
        value_scale,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        slabs.stride(0),
        slots.stride(0),
        page_units(tails),
        layer * tails.stride(1),
        HEADS=num_heads,
        Q_PER_KV=per_head,
        TOKENS=tails.shape[4],
        PAGES=pages.shape[1],
        UNIT=unit(tails),
        HEAD_DIM=dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        PRECISION=tile.precision,
        DIVIDED=scratch is not None,
        PARTIAL=opens is not None,
        LSE=head_lse is not None,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        CENTRED=form.centred,
        num_warps=tile.warps,
    )
    if scratch is not None:
        combine_tiles_kernel[(len(tiles), num_heads, tile.block_m)](
            partial,
            lse,
            parts,
            tiles,
            output,
            head_lse,
            sinks,
            len(ctas),
            HEADS=num_heads,
            Q_PER_KV=per_head,
            HEAD_DIM=dim,
            BLOCK_M=tile.block_m,
            BLOCK_P=COMBINED_PARTS,
            LSE=head_lse is not None,
            num_warps=4,
        )
    return kernel

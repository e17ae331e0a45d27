"""Decode: one query per request and query head over the head's kept rows and the tail.

Split-KV, as in FlashDecoding, in two launches. In the first, every CTA of the CTA map takes its part of one head's rows
of one request; the rows are the kept rows of all sealed segments, then those of the tail, to the last of which, the new
token, its key and value are written on the way (`newest.py`). The second merges the parts by their log-sum-exp. Both
grids depend on the layer and the batch bucket alone, so CUDA graphs can hold them: the view is read on the device, and
a CTA whose part has no rows writes a log-sum-exp of -inf and ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.append import Newest, see_newest, take_newest
from sgl_ragged.attention.kernels.attend import attend_slabs, attend_tail
from sgl_ragged.attention.kernels.primitives import (
    COMBINED_PARTS,
    LN2,
    LOG2E,
    cells,
    columns,
    merge_parts,
    page_units,
    unit,
)
from sgl_ragged.attention.kernels.quantize_fp8 import reciprocals
from sgl_ragged.attention.kernels.tiles import Tile
from sgl_ragged.attention.view import DecodeView
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat


@triton.jit(do_not_specialize=["slots_stride", "layer", "feature_stride"])
def decode_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    slabs_ptr,
    tails_ptr,
    slots_ptr,
    pages_ptr,
    seen_ptr,
    open_lengths_ptr,
    ctas_ptr,
    kept_ptr,
    key_blocks_ptr,
    opens_ptr,
    features_ptr,
    gate_output_ptr,
    inputs_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    value_scale,
    key_reciprocal,
    value_reciprocal,
    query_stride,
    key_stride,
    value_stride,
    slab_elems,
    slots_stride,
    page_units,
    layer_start,
    layer,
    feature_stride,
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
    PARTIAL: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CENTRED: tl.constexpr,
    LARGEST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    request = tl.program_id(0)
    cta = tl.program_id(1)
    head = tl.load(ctas_ptr + cta * 4)
    part = tl.load(ctas_ptr + cta * 4 + 1)
    parts = tl.load(ctas_ptr + cta * 4 + 2)
    place = request * tl.num_programs(1) + tl.load(ctas_ptr + cta * 4 + 3)
    kept = tl.load(kept_ptr + head)

    history = tl.load(seen_ptr + request) * kept
    open_tokens = tl.load(open_lengths_ptr + request)
    # Padding of no length has no token.
    owns = (part == parts - 1) & (open_tokens > 0)
    open_rows, attends = open_tokens, owns
    if PARTIAL:
        # A head's tail is stored here even if other ranks attend to it.
        opens = tl.load(opens_ptr + head)
        open_rows *= opens
        attends &= opens > 0
    rows_in_all = history + open_rows
    units = (rows_in_all + 15) // 16
    begin = tl.minimum(units * part // parts * 16, rows_in_all)
    end = tl.minimum(units * (part + 1) // parts * 16, rows_in_all)

    query_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, columns(HEAD_DIM))
    lse_at = lse_ptr + place * Q_PER_KV + query_rows
    if begin >= end:
        if PARTIAL:  # noqa: SIM102, as one condition it would not be known to the compiler
            if owns:
                take_newest(
                    keys_ptr,
                    values_ptr,
                    key_stride,
                    value_stride,
                    key_reciprocal,
                    value_reciprocal,
                    tails_ptr + layer_start,
                    features_ptr,
                    gate_output_ptr,
                    inputs_ptr,
                    pages_ptr + request * PAGES,
                    page_units,
                    layer,
                    request,
                    head,
                    open_tokens - 1,
                    feature_stride,
                    HEADS,
                    TOKENS,
                    UNIT,
                    HEAD_DIM,
                    BLOCK_M,
                    LARGEST,
                    FEATURES,
                )
        tl.store(lse_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=query_rows < Q_PER_KV)
        return

    query_at = request.to(tl.int64) * query_stride + (head * Q_PER_KV + query_rows[:, None]) * HEAD_DIM + dims[None, :]
    query = tl.load(queries_ptr + query_at, mask=cells(query_rows < Q_PER_KV, HEAD_DIM), other=0.0)
    scale2 = scale * LOG2E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, columns(HEAD_DIM)], tl.float32)
    history_first, history_last = tl.minimum(begin, history), tl.minimum(end, history)
    tail_first, tail_last = tl.maximum(begin, history) - history, tl.maximum(end, history) - history
    tail_last -= attends.to(tl.int32)
    best, total, output = attend_slabs(
        query,
        best,
        total,
        output,
        slabs_ptr,
        slots_ptr + request * slots_stride,
        key_blocks_ptr + head,
        slab_elems,
        kept,
        history_first,
        history_last,
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
    best, total, output = attend_tail(
        query,
        best,
        total,
        output,
        tails_ptr + layer_start + head * TOKENS * HEAD_DIM,
        pages_ptr + request * PAGES,
        page_units,
        HEADS * TOKENS * HEAD_DIM,
        tail_first,
        tail_last,
        scale2,
        TOKENS,
        PAGES,
        UNIT,
        HEAD_DIM,
        BLOCK_N,
        STAGES,
        PRECISION,
    )

    if owns:
        # Behind the walks, and with queries read once more: so no registers are held for this during loops.
        new_keys, new_values = take_newest(
            keys_ptr,
            values_ptr,
            key_stride,
            value_stride,
            key_reciprocal,
            value_reciprocal,
            tails_ptr + layer_start,
            features_ptr,
            gate_output_ptr,
            inputs_ptr,
            pages_ptr + request * PAGES,
            page_units,
            layer,
            request,
            head,
            open_tokens - 1,
            feature_stride,
            HEADS,
            TOKENS,
            UNIT,
            HEAD_DIM,
            BLOCK_M,
            LARGEST,
            FEATURES,
        )
        query = tl.load(queries_ptr + query_at, mask=cells(query_rows < Q_PER_KV, HEAD_DIM), other=0.0)
        best, total, output = see_newest(query, new_keys, new_values, scale2, attends, best, total, output)

    output = output / total[:, None]
    if value_scale is not None:
        output *= value_scale
    lse = (best + tl.log2(total)) * LN2
    partial_at = (place * Q_PER_KV + query_rows[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(partial_ptr + partial_at, output, mask=cells(query_rows < Q_PER_KV, HEAD_DIM))
    tl.store(lse_at, lse, mask=query_rows < Q_PER_KV)


@triton.jit(do_not_specialize=["num_ctas"])
def combine_kernel(
    partial_ptr,
    lse_ptr,
    parts_ptr,
    output_ptr,
    head_lse_ptr,
    sinks_ptr,
    num_ctas,
    HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2)
    place = request * num_ctas + tl.load(parts_ptr + head * 2)
    parts = tl.load(parts_ptr + head * 2 + 1)
    output, head_lse = merge_parts(partial_ptr, lse_ptr, place * Q_PER_KV + query, Q_PER_KV, parts, HEAD_DIM, BLOCK_P)
    if PARTIAL:
        tl.store(head_lse_ptr + (request * HEADS + head) * Q_PER_KV + query, head_lse)
    if sinks_ptr is not None:
        # As `attention.sinks.with_sinks`.
        output *= tl.sigmoid(head_lse - tl.load(sinks_ptr + head * Q_PER_KV + query).to(tl.float32))
    dims = tl.arange(0, columns(HEAD_DIM))
    output_at = ((request * HEADS + head) * Q_PER_KV + query) * HEAD_DIM + dims
    tl.store(output_ptr + output_at, output.to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_parts(
    queries: torch.Tensor,
    newest: Newest,
    slabs: torch.Tensor,
    tails: torch.Tensor,
    layer: int,
    view: DecodeView,
    ctas: torch.Tensor,
    kept: torch.Tensor,
    key_blocks: torch.Tensor,
    scale: float,
    value_scale: float | None,
    partial: torch.Tensor,
    lse: torch.Tensor,
    tile: Tile,
    opens: torch.Tensor | None = None,
    form: SlabFormat = WIDE,
) -> object:
    """Attention of each part of the CTA map; writes the new tokens' keys and values to the tails.

    Args:
        queries: [batch, heads, q_per_kv, d]; the batch stride may be any.
        newest: what is written, of each request that has tokens. Changes `tails`, and with gates `newest.gate.inputs`.
        slabs: [slots, elements of a slab]. tails: [slots, layers, 2 (K, V), heads, T, d], `Tails.data`. Of any
            floating dtype, in attention they have that of the queries; slabs may be bytes of a quantised format.
        view: what each query sees.
        ctas: int32 [CTAs, 4], `cta_map.cta_table` of this layer.
        kept: int32 [heads]. key_blocks: int64 [heads], where a head's keys start in a slab, in blocks of 16 elements.
        scale, value_scale: `SlabStore.logit_scale` and `value_scale`.
        partial: float32, at least [batch, CTAs, q_per_kv, d] elements. lse: float32, at least [batch, CTAs, q_per_kv].
            Both are overwritten: parts in head-major order, natural logarithm, -inf for a part without rows.
        opens: int32 [heads], 0 for heads that do not attend to the open segment, else 1; None where all do. `kept` may
            only be 0 with it.
        form: of the slabs.

    Returns:
        The compiled kernel, of which registers and shared memory can be asked; None in the interpreter.
    """
    batch, heads, per_head, dim = queries.shape
    scales, gate = newest.scales, newest.gate
    assert per_head <= tile.block_m, f"{per_head} query heads per KV head do not fit in {tile.block_m} rows"
    return decode_kernel[(batch, len(ctas))](
        queries,
        newest.keys,
        newest.values,
        slabs,
        tails,
        view.slots,
        view.pages,
        view.seen,
        view.open_lengths,
        ctas,
        kept,
        key_blocks,
        opens,
        *((gate.features, gate.output, gate.inputs) if gate is not None else (None, None, None)),
        partial,
        lse,
        scale,
        value_scale,
        *(reciprocals(scales) if scales is not None else (None, None)),
        queries.stride(0),
        newest.keys.stride(0),
        newest.values.stride(0),
        slabs.stride(0),
        view.slots.stride(0),
        page_units(tails),
        layer * tails.stride(1),
        layer,
        gate.features.stride(0) if gate is not None else 0,
        HEADS=heads,
        Q_PER_KV=per_head,
        TOKENS=tails.shape[4],
        PAGES=view.pages.shape[1],
        UNIT=unit(tails),
        HEAD_DIM=dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        PRECISION=tile.precision,
        PARTIAL=opens is not None,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        CENTRED=form.centred,
        LARGEST=torch.finfo(tails.dtype).max if scales is not None else None,
        FEATURES=gate.output.shape[1] if gate is not None else 0,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )


def combine_parts(
    partial: torch.Tensor,
    lse: torch.Tensor,
    parts: torch.Tensor,
    num_ctas: int,
    output: torch.Tensor,
    head_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the parts of `decode_parts`. A head without rows gets zeros. Changes `output` and `head_lse` alone.

    Args:
        parts: int32 [heads, 2], `cta_map.head_parts` of this layer.
        num_ctas: CTAs of this layer.
        output: [batch, heads, q_per_kv, d], contiguous.
        head_lse: float32 [batch, heads, q_per_kv], contiguous, for log-sum-exps of all parts of each head, without
            sinks, or None.
        sinks: [heads * q_per_kv] in any floating dtype, contiguous: learned sinks, or None.
    """
    batch, heads, per_head, dim = output.shape
    combine_kernel[(batch, heads, per_head)](
        partial,
        lse,
        parts,
        output,
        head_lse,
        sinks,
        num_ctas,
        HEADS=heads,
        Q_PER_KV=per_head,
        HEAD_DIM=dim,
        BLOCK_P=COMBINED_PARTS,
        PARTIAL=head_lse is not None,
        num_warps=4,
    )

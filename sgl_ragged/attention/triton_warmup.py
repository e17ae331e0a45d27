"""Compile kernels when the server starts; a variant that is missing here delays a request by seconds.

Triton compiles another variant for other dtypes, constants, absent arguments, and numbers that divide by 16 or do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.segments import InTails

if TYPE_CHECKING:
    from sgl_ragged.attention.triton_ops import TritonOps


def warm_up(operations: TritonOps) -> None:
    """Launch every kernel in every variant that batches may need. Writes to row 0 and slot 0, which hold nothing."""
    store, layout = operations.store, operations.store.layout
    device, length = store.slabs.device, layout.segment + 1
    table = torch.zeros((1, 2 * layout.segment), dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    shape = (length, layout.num_heads, layout.head_dim)
    keys = torch.ones(shape, dtype=store.query_dtype, device=device)
    queries = keys[:, :, None].expand(-1, -1, store.q_per_kv, -1).contiguous()
    scorer_inputs = operations.made_up_inputs(length)
    lengths = torch.ones_like(row)
    # Layers with partial heads have kernels of their own.
    kinds = {operations.is_whole(layer): layer for layer in range(layout.num_layers)}
    for whole, layer in kinds.items():
        lse = None if whole else queries.new_empty(queries.shape[:3], dtype=torch.float32)
        batch = operations.describe_extend(table, row, [0], [length])
        operations.extend(layer, queries, keys, keys, batch, scorer_inputs, lse)
        pages = torch.zeros((1, store.tails.open_pages.most), dtype=torch.int32, device=device)
        store.defer_seals(InTails(row, pages, row, torch.zeros_like(row)))
        store.flush_pending_seals()
        step = operations.describe_decode(table, row, lengths, lengths.cpu())
        first = None if scorer_inputs is None else scorer_inputs[:1]
        operations.decode(layer, queries[:1], keys[:1], keys[:1], step, first, None if lse is None else lse[:1])
        if device.type == "cuda":
            _attention(operations, layer, table, row, queries[:1], keys[:1])
    store.seal_meter.reset()


def _attention(
    operations: TritonOps, layer: int, table: torch.Tensor, row: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> None:
    """Launch variants of attention: with and without log-sum-exps, and chunks for which heads are divided.

    Learned sinks, retrieval and split heads need log-sum-exps, which is known when the model runs.
    """
    newest = operations.newest(layer, keys, keys, operations.made_up_inputs(1))
    keys, _ = operations.to_cache(layer, keys, keys)
    output = torch.empty_like(queries)
    given = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    batch = operations.describe_extend(table, row, [0], [1])
    work, scratch = operations.divided(1)
    batches = [batch] if scratch is None else [batch, replace(batch, work=work, scratch=scratch)]
    step = operations.describe_decode(table, row, torch.ones_like(row), torch.ones(1, dtype=torch.int64))
    for lse in (None, given) if operations.is_whole(layer) else (given,):
        for one in batches:
            operations.attend_chunks(layer, queries, keys, keys, one, output, lse)
        operations.attend(layer, queries, newest, step, lse)
    if operations.adds_sinks and operations.is_whole(layer):
        for dtype in {operations.store.query_dtype, torch.float32}:
            sinks = queries.new_zeros(queries[0, :, :, 0].numel(), dtype=dtype)
            for one in batches:
                operations.attend_chunks(layer, queries, keys, keys, one, output, None, sinks)
            operations.attend(layer, queries, newest, step, None, sinks)

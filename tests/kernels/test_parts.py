"""What decode and extend share, on its own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.attend import segment_of
from sgl_ragged.attention.kernels.primitives import merge_parts


@triton.jit
def _segments(numbers_ptr, out_ptr, kept, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, segment_of(number, 16.0 / kept), mask=at < count)


def test_rows_are_divided_exactly():
    """At the rows that border a segment, up to 16 million of them, for all kept counts to 1024."""
    for kept in range(16, 1025, 16):
        borders = torch.arange(0, 2**24, kept)
        borders = torch.cat([borders[:2000], borders[-2000:]])
        numbers = torch.cat([borders, borders + 15, borders + kept - 1, borders + kept - 16]).int()
        found = torch.empty_like(numbers)
        _segments[(triton.cdiv(len(numbers), 4096),)](numbers, found, kept, len(numbers), BLOCK=4096)
        assert torch.equal(found, numbers // kept), kept


@triton.jit
def _merge(partial_ptr, lse_ptr, out_ptr, parts, DIM: tl.constexpr):
    output, _ = merge_parts(partial_ptr, lse_ptr, tl.program_id(0), tl.num_programs(0), parts, DIM, 4)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    tl.store(out_ptr + tl.program_id(0) * DIM + dims, output, mask=dims < DIM)


@pytest.mark.parametrize("dim", [16, 80])
def test_parts_are_merged_by_their_weight_and_empty_ones_not_read(dim):
    parts, queries = 11, 5
    generator = torch.Generator().manual_seed(0)
    partial = torch.randn(parts, queries, dim, generator=generator)
    lse = 40 * torch.randn(parts, queries, generator=generator)
    for query, empty in enumerate([[], [0], [0, 1, 2, 3, 4], list(range(1, parts)), list(range(parts))]):
        lse[empty, query] = -torch.inf
        partial[empty, query] = torch.nan
    found = torch.empty(queries, dim)
    _merge[(queries,)](partial, lse, found, parts, DIM=dim)
    weights = lse.double().softmax(dim=0).nan_to_num(0)
    want = torch.einsum("pq,pqd->qd", weights, partial.nan_to_num(0).double())
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-4)
    assert (found[-1] == 0).all()

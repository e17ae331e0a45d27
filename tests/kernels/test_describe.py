"""The kernels that describe batches, against `decode_view` and what `Operations` look up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels.describe import describe, describe_chunks
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.attention.view import DecodeView, decode_view, extend_view
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer

SEGMENT, ROWS, SEGMENTS = 48, 5, 21
LENGTHS = [0, 1, SEGMENT, SEGMENT + 1, 20 * SEGMENT - 1, SEGMENTS * SEGMENT]


@pytest.mark.parametrize("limit", [None, 3, 40])
@pytest.mark.parametrize("tokens", [5, 16, SEGMENT])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_same_as_in_torch(limit, tokens, dtype, monkeypatch):
    # More than one look at a request's slots.
    monkeypatch.setattr("sgl_ragged.attention.kernels.describe.BLOCK_SLOTS", 8)
    torch.manual_seed(tokens)
    layout = SlabLayout(np.full((1, 1), SEGMENT), 16, SEGMENT)
    store = SlabStore(layout, get_scorer("keydiff"), 2, ROWS, torch.float32, "cpu", pages=OpenPages(SEGMENT, tokens))
    tails = store.tails
    tails.table.random_(1, 1000)
    # SGLang's table may be wider than whole segments are.
    table = torch.randint(0, 1000 * SEGMENT, (ROWS, SEGMENTS * SEGMENT + 7), dtype=torch.int32)
    in_view = None
    if limit is not None:
        columns = min(limit, SEGMENTS)
        in_view = torch.stack([torch.randperm(SEGMENTS)[:columns].sort().values for _ in range(ROWS)]).to(torch.int32)
    most = SEGMENTS + 1 if limit is None else columns
    rows = torch.tensor([0, 1, 2, 3, 4, 2], dtype=dtype)
    lengths = torch.tensor(LENGTHS, dtype=dtype)
    # Both start with what the batch before has left.
    found, wanted = (DecodeView.empty(len(rows) + 2, most, tails) for _ in range(2))
    for view in (found, wanted):
        for name in DecodeView.__dataclass_fields__:
            getattr(view, name).fill_(7)
    view = describe(table, rows, lengths, tails.table, SEGMENT, found, in_view)
    want = decode_view(table, rows, lengths, tails, wanted, in_view)
    for name in ("req_pool_indices", "pages", "open_offsets", "open_lengths", "seen"):
        assert torch.equal(getattr(view, name), getattr(want, name)), name
        assert (getattr(found, name)[len(rows) :] == 7).all(), name
    for number, seen in enumerate(want.seen.tolist()):
        assert torch.equal(view.slots[number, :seen], want.slots[number, :seen])
        assert (view.slots[number, seen:] == 7).all()


@pytest.mark.parametrize("tokens", [5, SEGMENT])
def test_chunks_as_in_torch(tokens, monkeypatch):
    """That stay in a segment, that finish one or several, that end at a border, that begin with one."""
    # More than one look at what is finished.
    monkeypatch.setattr("sgl_ragged.attention.kernels.describe.BLOCK_SEALS", 4)
    torch.manual_seed(tokens)
    layout = SlabLayout(np.full((1, 1), SEGMENT), 16, SEGMENT)
    store = SlabStore(layout, get_scorer("keydiff"), 2, 8, torch.float32, "cpu", pages=OpenPages(SEGMENT, tokens))
    store.tails.table.random_(1, 1000)
    table = torch.randint(0, 1000 * SEGMENT, (8, SEGMENTS * SEGMENT), dtype=torch.int32)
    prefixes, ends = [0, 5, 7, SEGMENT - 1, 0, 3 * SEGMENT], [3, 20, SEGMENT, 8 * SEGMENT + 1, SEGMENT, 3 * SEGMENT + 1]
    lengths = [end - prefix for prefix, end in zip(prefixes, ends, strict=True)]
    rows = torch.tensor([3, 1, 7, 2, 5, 6])
    view = extend_view(table, rows, prefixes, lengths, SEGMENT)
    before, behind = torch.from_numpy(view.open_segments)
    seals = [tuple(torch.from_numpy(found[:, :2].T.copy())) for found in (view.tail_seals, view.chunk_seals)]
    assert all(len(requests) for requests, _ in seals)
    found = describe_chunks(view.pages, rows, store.tails.table, before, behind, *seals)
    wanted = TorchOps(store).look_up(view, before, behind, *seals)
    # Behind a chunk that ends where the longest does, a request has no page of its own yet.
    exists = behind < view.pages.shape[1]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1][exists], wanted[1][exists])
    assert torch.equal(found[1][:, 1:], wanted[1][:, 1:])
    assert all(torch.equal(one, other) for one, other in zip(found[2:], wanted[2:], strict=True))

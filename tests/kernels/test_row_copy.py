"""Rows that are copied between the pool and the host in one launch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels.row_copy import BLOCK_WORDS, PROGRAMS, copy_rows
from sgl_ragged.features.host_tier.codecs import CODECS
from sgl_ragged.features.host_tier.score_transfer import ScoreTransfer
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.mem_pool.layout import SlabLayout


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("words", [1, 7, 16, BLOCK_WORDS, BLOCK_WORDS + 3])
def test_parts_of_rows(words, programs, monkeypatch):
    monkeypatch.setattr("sgl_ragged.attention.kernels.row_copy.PROGRAMS", programs)
    source = torch.randint(0, 256, (5, 4 * (words + 6)), dtype=torch.uint8)
    target = torch.zeros((4, 4 * (words + 9)), dtype=torch.uint8)
    copy_rows(source, target, torch.tensor([4, 0]), torch.tensor([1, 3]), (8, 8 + 4 * words), 12)
    wanted = torch.zeros_like(target)
    for row, other in ((1, 4), (3, 0)):
        wanted[row, 12 : 12 + 4 * words] = source[other, 8 : 8 + 4 * words]
    assert torch.equal(target, wanted)


def test_a_large_copy_leaves_the_gpu_to_others(monkeypatch):
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr("sgl_ragged.attention.kernels.row_copy.copy_rows_kernel", Launched())
    slabs, rows = torch.zeros((2, 1 << 22), dtype=torch.uint8), torch.zeros(128, dtype=torch.int64)
    copy_rows(slabs, slabs, rows, rows, (0, 1 << 22), 0)
    copy_rows(slabs, slabs, rows[:1], rows[:1], (0, 64), 0)
    assert grids == [(PROGRAMS,), (1,)]


def test_nothing_to_copy():
    source, target = torch.ones((2, 8), dtype=torch.uint8), torch.zeros((2, 8), dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    copy_rows(source, target, none, none, (0, 8), 0)
    copy_rows(source, target, torch.tensor([0]), torch.tensor([1]), (4, 4), 0)
    assert not target.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_slabs_come_back_as_from_slab_by_slab_copies(dtype):
    layout = SlabLayout(kept=np.array([[16, 48], [32, 16], [64, 64]]), head_dim=16, segment=64)
    slabs, codec = torch.randn((6, layout.slab_elems)).to(dtype), CODECS["exact"](layout, dtype)
    found = []
    for row_copy in (None, copy_rows):
        rows, back = torch.zeros((4, codec.row_bytes), dtype=torch.uint8), torch.zeros_like(slabs)
        transfer = SlabTransfer(codec, rows, row_copy)
        transfer.back_up(slabs, torch.tensor([5, 2]), torch.tensor([1, 3]))
        for layer in range(layout.num_layers):
            transfer.restore(back, torch.tensor([1, 4]), torch.tensor([3, 1]), layer)
        found.append((rows, back))
    (rows, back), (rows_at_once, back_at_once) = found
    assert torch.equal(rows, rows_at_once)
    assert (back == back_at_once).all()
    assert (back[4] == slabs[5]).all()


def test_scores_come_back_as_from_plain_copies():
    for row_copy in (None, copy_rows):
        scores = SimpleNamespace(values=torch.randn((6, 3)))
        was = scores.values.clone()
        transfer = ScoreTransfer(scores, 4, row_copy)
        transfer.back_up(torch.tensor([5, 2]), torch.tensor([1, 3]))
        assert torch.equal(transfer.rows[[1, 3]], was[[5, 2]])
        transfer.restore(torch.tensor([0, 4]), torch.tensor([3, 1]))
        assert torch.equal(scores.values, was[[2, 1, 2, 3, 5, 5]])

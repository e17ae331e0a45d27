"""What heads dropped goes to the host by one copy of a layer, as it does element by element on CPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels.row_copy import copy_rows
from sgl_ragged.features.retrieval.reservoir import Reservoir
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import InChunk
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer

SEGMENT, DIM, HEADS = 64, 8, 3
KEPT = np.array([[16, 64, 32], [32, 16, 48]])
SATELLITES = ((0, 2), (1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("capacity", [2, 3, 4])
def test_the_same_entries_as_without_a_kernel(dtype, capacity):
    layout = SlabLayout(kept=KEPT, head_dim=DIM, segment=SEGMENT)
    store = SlabStore(layout, get_scorer("keydiff"), 8, 2, dtype, "cpu", query_dtype=torch.float32)
    plain, copied = (Reservoir(store, SATELLITES, capacity) for _ in range(2))
    copied._row_copy = copy_rows
    for one in (plain, copied):
        one._data.view(torch.uint8).zero_()
        one._row_indices.zero_()
    rng = torch.Generator().manual_seed(0)
    for chunk in ([1, 5, 3], [4], [5, 2]):
        slots, numbers = torch.tensor(chunk), torch.arange(len(chunk))
        for layer in range(len(KEPT)):
            keys, values = torch.randn((2, len(chunk) * SEGMENT, HEADS, DIM), generator=rng).to(dtype)
            store.seal(layer, InChunk(numbers * SEGMENT, slots, numbers, keys, values, None))
    assert plain._entries == copied._entries
    assert len(plain) == min(capacity, 5)
    assert plain.bytes_written == copied.bytes_written
    assert torch.equal(plain._data.view(torch.uint8), copied._data.view(torch.uint8))
    assert torch.equal(plain._row_indices, copied._row_indices)
    assert plain._data.view(torch.uint8).any()

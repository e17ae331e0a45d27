"""Whose the pages of open segments are from batch to batch, by hand."""

from __future__ import annotations

import torch

from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from tests.pool_machine import LAYOUT, SEGMENT


def test_pages_of_what_a_batch_finishes_are_not_for_the_same_batch():
    """Decode may be allocated amid prefill, for one forward pass: it reads what both of them finish."""
    store = SlabStore(LAYOUT, get_scorer("keydiff"), 20, 3, torch.float32, "cpu")
    open_segments = OpenSegments(store)
    full = open_segments.pages.extra(SEGMENT)
    open_segments.extend([1], [0], [SEGMENT - 1], torch.arange(1, 1 + full))
    store.begin_batch()
    open_segments.extend([1], [SEGMENT - 1], [SEGMENT + 1], torch.tensor([9]))
    assert open_segments.take_back() == []
    assert open_segments.returning == 0
    assert open_segments.in_use == full + 1
    store.begin_batch()
    assert open_segments.returning == full + 1
    back = torch.cat(open_segments.take_back())
    assert sorted(back.tolist()) == [*range(1, 1 + full), 9]
    assert open_segments.in_use == 0

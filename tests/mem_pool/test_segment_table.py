"""The request table by segments."""

from __future__ import annotations

import torch

from sgl_ragged.mem_pool.segments import SegmentTable

SEGMENT = 4


def test_entries_become_slots():
    """Three rows of ten tokens: two whole segments and a piece of a third."""
    pages = torch.tensor([[0, 0, 0], [5, 2, 9], [7, 1, 3]], dtype=torch.int32)
    tokens = (pages[:, :, None] * SEGMENT + torch.arange(SEGMENT, dtype=torch.int32)).flatten(1)[:, :10].contiguous()
    table = SegmentTable(tokens, SEGMENT)
    assert (table.num_rows, table.most_segments) == (3, 3)
    rows = torch.tensor([2, 1])
    assert table.first_slots(rows, 2).tolist() == [[7, 1], [5, 2]]
    assert table.first_slots(rows, 9).tolist() == [[7, 1, 3], [5, 2, 9]]
    assert table.slots(rows, torch.tensor([2, 0])).tolist() == [3, 5]
    assert table.slots(rows[:, None], torch.tensor([[0, 1], [1, 2]])).tolist() == [[7, 1], [2, 9]]
    assert table.slots(1, torch.tensor([2, 1])).tolist() == [9, 2]
    assert table.row_slots(1, 3).tolist() == [5, 2, 9]
    assert (tokens[1, :4] == torch.arange(20, 24)).all(), "the table itself is as it was"

"""Rows of the host tier, the copies in both directions, and pages of storage: without SGLang."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.features.host_tier.codecs import CODECS
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer, layer_groups
from sgl_ragged.features.host_tier.stored_page import FOOTER_BYTES, read_page, write_page
from sgl_ragged.features.host_tier.tier_plan import TierPlan
from sgl_ragged.mem_pool.kv_dtype import FP8
from sgl_ragged.mem_pool.layout import SlabLayout

KEPT = np.array([[16, 48], [32, 16], [64, 64], [16, 16], [48, 32]])
LAYOUT = SlabLayout(kept=KEPT, head_dim=8, segment=64)


def filled(slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((slots, LAYOUT.slab_elems), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8])
def test_slabs_come_back_as_they_were(dtype):
    slabs = filled(6, dtype)
    codec = CODECS["exact"](LAYOUT, dtype)
    rows = torch.zeros((4, codec.row_bytes), dtype=torch.uint8)
    transfer = SlabTransfer(codec, rows)
    transfer.back_up(slabs, torch.tensor([5, 1, 2]), torch.tensor([0, 3, 1]))
    back = torch.full_like(slabs, 7)
    for layer in range(LAYOUT.num_layers):
        transfer.restore(back, torch.tensor([4, 2]), torch.tensor([3, 0]), layer)
        until = int(LAYOUT.layer_start[layer + 1])
        assert (back[4, :until] == slabs[1, :until]).all(), "a layer's part is there when its turn is over"
    assert (back[4] == slabs[1]).all()
    assert (back[2] == slabs[5]).all()
    assert (back[[0, 1, 3, 5]] == 7).all(), "nothing else was written"


@given(
    kept=st.lists(st.lists(st.sampled_from([16, 32, 64]), min_size=2, max_size=2), min_size=1, max_size=9),
    groups=st.integers(1, 12),
)
def test_groups_hold_every_layer_once_and_in_order(kept, groups):
    layout = SlabLayout(kept=np.array(kept), head_dim=8, segment=64)
    found = layer_groups(layout, groups)
    assert len(found) <= groups
    assert [layer for first, end in found for layer in range(first, end)] == list(range(len(kept)))


def test_groups_hold_about_equally_many_bytes():
    layout = SlabLayout(kept=np.full((32, 2), 32), head_dim=8, segment=64)
    assert layer_groups(layout, 4) == ((0, 8), (8, 16), (16, 24), (24, 32))


def a_row() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).repeat(3)


def test_a_page_is_read_as_what_it_was_written():
    page = write_page(a_row(), "one")
    assert len(page) == 768 + FOOTER_BYTES
    row = read_page(page, "one")
    assert row is not None
    assert torch.equal(row, a_row())
    assert read_page(page, "two") is None


@given(place=st.integers(0, 768 + FOOTER_BYTES - 1), bit=st.integers(0, 7))
def test_no_changed_bit_goes_unseen(place, bit):
    page = write_page(a_row(), "one")
    page[place] ^= 1 << bit
    assert read_page(page, "one") is None


def test_identities_differ_in_everything_that_slabs_depend_on():
    plan = TierPlan(codec="exact", served="a", sized=True, restore="auto")
    others = [
        TierPlan(codec="exact", served="b", sized=True, restore="auto").rank_identity(0, "float32"),
        TierPlan(codec="fp8", served="a", sized=True, restore="auto").rank_identity(0, "float32"),
        plan.rank_identity(1, "float32"),
        plan.rank_identity(0, "bfloat16"),
    ]
    own = plan.rank_identity(0, "float32")
    assert own not in others
    assert len(set(others)) == 4
    assert TierPlan(codec="exact", served="a", sized=False, restore="load").rank_identity(0, "float32") == own

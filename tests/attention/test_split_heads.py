"""Heads that are split over ranks: the ranks' weighted parts add up to attention over the whole head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_format import FORMATS, INT8
from tests.split_heads import FULL_PARTS, PLACEMENTS, check_parts


@pytest.mark.parametrize("scorer", ["keydiff", "h2o", "fastkvzip"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_parts_add_up_to_the_whole(case, scorer):
    check_parts(case, scorer)


@pytest.mark.parametrize("form", [INT8, FORMATS["k8v4"], FORMATS["k6v4"], FORMATS["k4v4"]], ids=lambda one: one.name)
@pytest.mark.parametrize("case", PLACEMENTS)
def test_parts_of_codes_add_up_to_the_whole(case, form):
    check_parts(case, "keydiff", steps=5, form=form)


def test_a_part_of_nothing_is_nothing():
    """Not NaN, whatever the output of the empty part holds; and the other part is untouched where it is alone."""
    exchange = LseExchange(FULL_PARTS, 0, "cpu", lambda own: torch.cat([torch.full_like(own, -torch.inf), own]))
    output = torch.full((3, 2, 2, 4), torch.nan)
    lse = torch.full((3, 2, 2), -torch.inf)
    assert (exchange.weigh(0, output, lse)[:, 0] == 0).all()
    assert output[:, 1].isnan().all(), "head 1 is whole here"
    output, lse = torch.ones(3, 2, 2, 4), torch.zeros(3, 2, 2)
    exchange = LseExchange(FULL_PARTS, 0, "cpu", lambda own: torch.cat([own, torch.full_like(own, -torch.inf)]))
    assert (exchange.weigh(0, output, lse) == 1).all()


def test_layers_without_parts_exchange_nothing():
    placement = plan_placement(np.full((1, 4), 32), 2, "split")
    exchange = LseExchange(placement, 0, "cpu", lambda own: pytest.fail("no head is split"))
    assert not exchange.needed(0)


def test_shares_that_do_not_fit_are_refused():
    kept, total = np.array([[32, 16]]), np.array([[48, 16]])
    SlabLayout(kept, 8, 64, total=total, first=np.array([[16, 0]]))
    with pytest.raises(RaggedConfigError, match="must not end behind"):
        SlabLayout(kept, 8, 64, total=total, first=np.array([[32, 0]]))
    with pytest.raises(RaggedConfigError, match="non-negative"):
        SlabLayout(kept, 8, 64, total=total, first=np.array([[-16, 0]]))


def test_sizes_count_what_is_stored_here():
    layout = SlabLayout(
        np.array([[16, 0, 32]]), 8, 64, total=np.array([[32, 16, 32]]), first=np.array([[16, 0, 0]]), full_heads=2
    )
    assert layout.slab_elems == 2 * 8 * 48
    assert layout.full_bytes_per_token(1) == 2 * 2 * 8
    assert layout.mean_kept_share == 48 / 2 / 64
    assert [(band.heads, band.partial, band.attends_open) for band in layout.bands[0]] == [
        ((2,), False, True),
        ((0,), True, False),
        ((1,), True, False),
    ]

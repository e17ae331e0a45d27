"""Heads that are split over ranks: the ranks' weighted parts add up to attention over the whole head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.layout import SlabLayout
from tests.rig import KEPT, SEGMENT, Rig, Sequence

# Three ranks of two places for two heads: a head in three parts, in two with nothing between, a place for nothing at
# all, and one before the head's first entries.
PARTS = Placement(
    heads=np.array([[[0, 1], [0, 1], [0, 1]], [[0, 1], [0, 1], [1, 0]]]),
    kept=np.array([[[16, 16], [16, 0], [16, 32]], [[0, 16], [16, 0], [0, 0]]]),
    mode="split",
)
PARTS_KEPT = np.array([[48, 48], [16, 16]])
FULL_PARTS = Placement(np.array([[[0, 1], [0, 1]]]), np.array([[[48, 16], [16, 0]]]), "split")

PLACEMENTS = {
    "planned for 2": (KEPT, plan_placement(KEPT, 2, "split")),
    "planned for 4": (KEPT, plan_placement(KEPT, 4, "split")),
    "parts of nothing": (PARTS_KEPT, PARTS),
    "all tokens in parts": (np.array([[64, 16]]), FULL_PARTS),
}


def weighed(placement: Placement, outputs: list[torch.Tensor], rigs: list[Rig]) -> list[torch.Tensor]:
    """Each rank's outputs [tokens, layers, places, q_per_kv, d] after the exchange, all ranks in one process."""
    results = [torch.empty_like(output) for output in outputs]
    for layer in range(len(placement.heads)):
        sent: list[torch.Tensor] = []

        def announce(own, sent=sent):
            sent.append(own)
            return own.repeat(placement.ranks, 1, 1)

        for ask in (announce, lambda _, sent=sent: torch.cat(sent)):
            for rank, (output, rig) in enumerate(zip(outputs, rigs, strict=True)):
                exchange = LseExchange(placement, rank, "cpu", ask)
                part = output[:, layer].clone()
                if exchange.needed(layer):
                    part = exchange.weigh(layer, part, rig.lse[:, layer].contiguous())
                results[rank][:, layer] = part
    return results


def summed(placement: Placement, results: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """What o and the all-reduce add up: [tokens, layers, heads, q_per_kv, d]."""
    total = torch.zeros(like.shape, dtype=torch.float64)
    for layer in range(len(placement.heads)):
        for rank, result in enumerate(results):
            total[:, layer].index_add_(1, torch.tensor(placement.heads[layer, rank]), result[:, layer].double())
    return total


@pytest.mark.parametrize("scorer", ["keydiff", "h2o", "fastkvzip"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_parts_add_up_to_the_whole(case, scorer):
    """Prefill at ragged edges, a second chunk, and decode over a border."""
    kept, placement = PLACEMENTS[case]
    lengths = [1, SEGMENT, 3 * SEGMENT + 7]
    sequences = [Sequence(length + SEGMENT + 40, *kept.shape, 2, 16, scorer, i) for i, length in enumerate(lengths)]
    expected = [sequence.expected(kept) for sequence in sequences]
    rigs = [Rig(kept, 16, scorer, 3, 6, placement=placement, rank=rank) for rank in range(placement.ranks)]

    def check(outputs: list[torch.Tensor], want: torch.Tensor) -> None:
        found = summed(placement, weighed(placement, outputs, rigs), want)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)

    middle = [length + 30 for length in lengths]
    for starts, ends in (([0] * 3, lengths), (lengths, middle)):
        outputs = [torch.cat(rig.extend(sequences, starts, ends)) for rig in rigs]
        check(outputs, torch.cat([e[a:b] for e, a, b in zip(expected, starts, ends, strict=True)]))
    for step in range(SEGMENT + 5):
        positions = [length + step for length in middle]
        outputs = [rig.decode(sequences, positions, padding=2) for rig in rigs]
        check(outputs, torch.stack([e[p] for e, p in zip(expected, positions, strict=True)]))


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
    assert layout.tail_bytes(1) == 2 * 3 * 64 * 8
    assert layout.full_bytes_per_token(1) == 2 * 2 * 8
    assert layout.mean_kept_share == 48 / 2 / 64
    assert [(band.heads, band.partial, band.attends_open) for band in layout.bands[0]] == [
        ((2,), False, True),
        ((0,), True, False),
        ((1,), True, False),
    ]

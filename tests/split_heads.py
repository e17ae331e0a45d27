"""Ranks of split heads in one process: the sum of their weighted parts, against attention over whole heads."""

from __future__ import annotations

import numpy as np
import torch

from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from tests.harness import KEPT, SEGMENT, TORCH, Harness, Kernel, Sequence

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


def weighed(placement: Placement, outputs: list[torch.Tensor], rigs: list[Harness]) -> list[torch.Tensor]:
    """Each rank's outputs [tokens, layers, places, q_per_kv, d] after the exchange, all ranks in one process."""
    results = [torch.empty_like(output) for output in outputs]
    for layer in range(len(placement.heads)):
        sent: list[torch.Tensor] = []

        def announce(own, sent=sent):
            sent.append(own)
            return own.repeat(placement.ranks, 1, 1)

        for ask in (announce, lambda _, sent=sent: torch.cat(sent)):
            for rank, (output, harness) in enumerate(zip(outputs, rigs, strict=True)):
                exchange = LseExchange(placement, rank, "cpu", ask)
                part = output[:, layer].clone()
                if exchange.needed(layer):
                    part = exchange.weigh(layer, part, harness.lse[layer])
                results[rank][:, layer] = part
    return results


def summed(placement: Placement, results: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """What o and the all-reduce add up: [tokens, layers, heads, q_per_kv, d]."""
    total = torch.zeros(like.shape, dtype=torch.float64)
    for layer in range(len(placement.heads)):
        for rank, result in enumerate(results):
            total[:, layer].index_add_(1, torch.tensor(placement.heads[layer, rank]), result[:, layer].double())
    return total


def check_parts(
    case: str,
    scorer: str,
    steps: int = SEGMENT + 5,
    kernel: Kernel = TORCH,
    form: SlabFormat = WIDE,
) -> None:
    """Prefill at ragged edges, a second chunk, and decode, over a border if there are enough steps."""
    kept, placement = PLACEMENTS[case]
    lengths = [1, SEGMENT, 3 * SEGMENT - 33]
    sequences = [Sequence(length + 30 + steps, *kept.shape, 2, 16, scorer, i) for i, length in enumerate(lengths)]
    expected = [sequence.expected(kept, form=form.name, placement=placement) for sequence in sequences]
    rigs = [
        Harness(kept, 16, scorer, 3, 6, placement=placement, rank=rank, kernel=kernel, form=form)
        for rank in range(placement.ranks)
    ]

    def check(outputs: list[torch.Tensor], want: torch.Tensor) -> None:
        found = summed(placement, weighed(placement, outputs, rigs), want)
        difference = (found - want).abs() - 1e-4 * want.abs()
        # Where two ways of rounding differ by a code, one output differs by a code's share of it.
        assert (difference < 1e-4).double().mean() >= (0.98 if form.quantised else 1)
        assert difference.max() < (0.05 if form.quantised else 1e-4)

    middle = [length + 30 for length in lengths]
    for starts, ends in (([0] * 3, lengths), (lengths, middle)):
        outputs = [torch.cat(harness.extend(sequences, starts, ends)) for harness in rigs]
        check(outputs, torch.cat([e[a:b] for e, a, b in zip(expected, starts, ends, strict=True)]))
    for step in range(steps):
        positions = [length + step for length in middle]
        outputs = [harness.decode(sequences, positions, padding=2) for harness in rigs]
        check(outputs, torch.stack([e[p] for e, p in zip(expected, positions, strict=True)]))

"""Attention of some heads to what was fetched for them, beside their slabs and tails, against a dense mask."""

from __future__ import annotations

import numpy as np
import torch

from sgl_ragged.features.retrieval.overlay import add_overlay, attend_overlay
from tests.harness import KEPT, SEGMENT, Harness, Kernel, Sequence
from tests.oracle import Tokens, visible

MOST, DIM, PER_HEAD = 5, 16, 2
SATELLITES = [0, 2]
"""Heads that something is fetched for, of a layer in which no head keeps everything."""


def dropped(sequence: Sequence, kept: np.ndarray, head: int) -> list[int]:
    """Tokens of sealed segments that the last query does not see."""
    keys = sequence.k[:, 0, head].double().numpy()
    return np.flatnonzero(~visible(sequence.scorer, Tokens(keys, keys), int(kept[0, head]), SEGMENT)[-1]).tolist()


def check_overlays(kernel: Kernel, lengths: list[int]) -> None:
    """The last token of prompts of these lengths, and then one decoded token, see overlays; one head's is empty."""
    kept = KEPT[:1]
    sequences = [Sequence(n + 1, 1, kept.shape[1], PER_HEAD, DIM, "keydiff", seed) for seed, n in enumerate(lengths)]
    harness = Harness(kept, DIM, "keydiff", len(lengths), 8, PER_HEAD, kernel=kernel, gives_lse=True)
    ends = harness.extend(sequences, [0] * len(lengths), lengths)
    sums = [lse[-1] for lse in harness.lse[0].split(lengths)]
    check(harness, [cut(s, n) for s, n in zip(sequences, lengths, strict=True)], torch.stack([e[-1, 0] for e in ends]),
          torch.stack(sums))  # fmt: skip
    output = harness.decode(sequences, lengths, padding=1)
    check(harness, sequences, output[:, 0], harness.lse[0])


def cut(sequence: Sequence, length: int) -> Sequence:
    """Its first tokens."""
    found = Sequence(1, 1, 1, 1, 1, sequence.scorer, 0)
    for name in ("q", "k", "v", "gates"):
        setattr(found, name, getattr(sequence, name)[:length])
    return found


def check(harness: Harness, sequences: list[Sequence], output: torch.Tensor, lse: torch.Tensor) -> None:
    """output [batch, heads, q_per_kv, d], lse [batch, heads, q_per_kv]: of each sequence's last token."""
    counts = torch.tensor([[(number + 2 * place) % (MOST + 1) for place in range(2)] for number in range(len(output))])
    rows = torch.full((len(output), len(SATELLITES), MOST, 2 * DIM), 9.0)
    expected = []
    for number, sequence in enumerate(sequences):
        fetched = {}
        for place, head in enumerate(SATELLITES):
            lost = dropped(sequence, harness.kept, head)
            found = lost[:: max(len(lost) // MOST, 1)][: int(counts[number, place])]
            counts[number, place] = len(found)
            fetched[0, head] = found
            rows[number, place, : len(found)] = torch.cat([sequence.k[found, 0, head], sequence.v[found, 0, head]], -1)
        expected.append(sequence.expected(harness.kept, fetched=fetched)[-1, 0])
    assert counts.min() == 0 < counts.max()
    heads, merged, sums = torch.tensor(SATELLITES), output.clone(), lse.clone()
    seen, own = attend_overlay(queries(sequences)[:, heads], rows, counts, 0.5)
    add_overlay(merged, sums, heads, seen, own, None)
    torch.testing.assert_close(merged.double(), torch.stack(expected), atol=1e-5, rtol=1e-4)
    plain = torch.stack([sequence.expected(harness.kept)[-1, 0] for sequence in sequences])
    torch.testing.assert_close(output.double(), plain, atol=1e-5, rtol=1e-4)
    assert (plain - torch.stack(expected)).abs().max() > 1e-2


def queries(sequences: list[Sequence]) -> torch.Tensor:
    """[batch, heads, q_per_kv, d]: of each sequence's last token."""
    return torch.stack([sequence.q[-1, 0] for sequence in sequences])

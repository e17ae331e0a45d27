"""Chains of drafts by Triton kernels, in the interpreter, against the dense mask."""

from __future__ import annotations

import pytest
import torch

from tests.harness import KEPT, SEGMENT, Harness, Sequence
from tests.kernels.operations import TRITON

MIXED = KEPT[:1]


@pytest.mark.parametrize("scorer", ["keydiff", pytest.param("h2o", marks=pytest.mark.thorough)])
def test_chains_that_end_at_borders(scorer):
    """One comes to its border in the first step, one is there at once, one begins in the sequence's first token."""
    width, lengths = 5, [SEGMENT - 3, 2 * SEGMENT - 1, 1]
    sequences = [Sequence(length + 12, *MIXED.shape, 2, 16, scorer, seed) for seed, length in enumerate(lengths)]
    expected = [sequence.expected(MIXED) for sequence in sequences]
    harness = Harness(MIXED, 16, scorer, len(lengths), 4, page_tokens=17, kernel=TRITON)
    harness.extend(sequences, [0] * len(lengths), lengths)
    at = lengths
    for accepted in ([3, 1, 2], [2, 5, 1], [1, 1, 5]):
        outputs = harness.verify(sequences, at, width, accepted)
        for output, want, place, count in zip(outputs, expected, at, accepted, strict=True):
            torch.testing.assert_close(output.double(), want[place : place + count], atol=1e-5, rtol=1e-4)
        at = [place + count for place, count in zip(at, accepted, strict=True)]
    step = harness.decode(sequences, at)
    want = torch.stack([e[place] for e, place in zip(expected, at, strict=True)])
    torch.testing.assert_close(step.double(), want, atol=1e-5, rtol=1e-4)

"""Triton attention in the interpreter against the dense mask, at ragged edges."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from tests.kernels.operations import triton_operations
from tests.rig import KEPT, SEGMENT, Rig, Sequence


def rig_for(kept, dim, scorer, requests, segments, per_head, method="exact", dtype=torch.float32) -> Rig:
    make = functools.partial(triton_operations, method=method)
    return Rig(kept, dim, scorer, requests, segments, per_head, make_operations=make, dtype=dtype)


@pytest.mark.parametrize(
    ("scorer", "per_head", "dim", "method"),
    [
        ("keydiff", 4, 64, "exact"),
        ("key_norm", 1, 64, "algorithm1"),
        ("value_key_norm", 8, 16, "uniform"),
        ("streaming", 3, 32, "none"),
        ("snapkv", 2, 16, "exact"),
        ("h2o", 16, 16, "exact"),
        ("expected_attention", 5, 16, "exact"),
        ("fastkvzip", 1, 128, "exact"),
    ],
)
def test_prefill_then_decode_at_ragged_edges(scorer, per_head, dim, method):
    """Lengths 1, S-1, S, S+1, 10S+7 in one launch, then decode with padded rows over a segment border."""
    lengths = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 10 * SEGMENT + 7]
    steps = 3
    sequences = [
        Sequence(length + steps, *KEPT.shape, per_head, dim, scorer, seed) for seed, length in enumerate(lengths)
    ]
    rig = rig_for(KEPT, dim, scorer, len(lengths), 12, per_head, method)
    expected = [sequence.expected(KEPT) for sequence in sequences]
    outputs = rig.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=1e-4, rtol=1e-4)
    for step in range(steps):
        output = rig.decode(sequences, [length + step for length in lengths], padding=3)
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)

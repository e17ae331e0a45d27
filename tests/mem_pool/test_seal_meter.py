"""Counting seals, and the rank_imbalance of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SealMeter
from sgl_ragged.serve.metrics import rank_imbalance


def test_a_segment_counts_once_all_its_layers_are_sealed():
    meter = SealMeter(num_layers=3)
    for _ in range(2):
        with meter.sealing(5):
            pass
    assert meter.segments == 10 // 3
    with meter.sealing(5):
        pass
    assert meter.segments == 5
    with meter.sealing(2, layers=3):
        pass
    assert meter.segments == 7
    assert meter.seconds > 0
    meter.reset()
    assert (meter.segments, meter.seconds) == (0, 0)


@pytest.mark.parametrize(
    ("kept", "expected"), [((64,), 1.0), ((32, 32), 1.0), ((48, 16), 1.5), ((16, 16, 16, 80), 2.5)]
)
def test_imbalance_is_the_largest_over_the_mean(kept, expected):
    layouts = [SlabLayout(kept=np.full((2, 1), n), head_dim=8, segment=128) for n in kept]
    assert rank_imbalance(layouts) == expected

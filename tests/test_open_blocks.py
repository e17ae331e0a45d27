"""What full blocks of open segments in 8 bits would change, in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import open_blocks
from benchmarks.open_blocks import BLOCK, SEGMENT, as_they_are, attention, gain, rounded


def test_a_query_sees_its_block_and_other_segments_as_they_are():
    exact = as_they_are(2 * SEGMENT, BLOCK)
    last = 2 * SEGMENT - 1
    assert exact[last].tolist() == [token < SEGMENT or token > last - BLOCK for token in range(2 * SEGMENT)]
    assert as_they_are(SEGMENT, 0).all()


def test_attention_without_blocks_is_causal_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 80, 64), torch.randn(1, 2, 80, 64), torch.randn(1, 2, 80, 64)
    found, _ = attention(0)(None, query, key, value, None, 0.125)
    every = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(query, *every, is_causal=True, scale=0.125)
    torch.testing.assert_close(found.transpose(1, 2), want, atol=1e-5, rtol=1e-5)
    coded, _ = attention(BLOCK)(None, query, key, value, None, 0.125)
    torch.testing.assert_close(coded[:, :BLOCK], found[:, :BLOCK], atol=1e-5, rtol=1e-5)
    assert (coded[:, -1] - found[:, -1]).abs().max() > 1e-5
    keys, _ = rounded(key, value)
    assert 0 < (keys - key).abs().max() < 0.05


def test_gain_is_the_ratio_of_what_requests_hold():
    # From half a segment to one and a half: on average half of a segment sealed, and any number of tokens open.
    lengths = np.arange(SEGMENT // 2, 3 * SEGMENT // 2)
    share = open_blocks.FORMATS["int8"].row_bytes(128, 2) / 512
    assert 0.5 < share < 0.52
    sealed = (lengths >= SEGMENT) * SEGMENT * 0.1
    full, begun = lengths % SEGMENT // BLOCK * BLOCK, (lengths % BLOCK > 0) * BLOCK
    want = (sealed + full + begun).sum() / (sealed + full * share + begun).sum()
    assert gain(0.1, SEGMENT) == pytest.approx(want)

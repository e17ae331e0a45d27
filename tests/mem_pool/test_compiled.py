"""Compiled loops against torch and numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.mem_pool import compiled
from sgl_ragged.mem_pool.quantise import ERROR_STEPS, FACTORS, choice, compiled_choice


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_scales_are_those_of_torch(bits):
    """Also of rows of zeros, with NaN or infinity, and far beyond their scales."""
    rows = torch.randn(2, 3, 400, 64, generator=torch.Generator().manual_seed(bits))
    rows[0, 0, 0], rows[0, 0, 1, 3], rows[0, 0, 2, 5] = 0, torch.nan, -torch.inf
    rows[0, 1] *= 1e4
    factors = torch.tensor(FACTORS[bits]).view(-1, 1, 1, 1)
    scales = (rows.abs().amax(dim=-1) / 2 ** (bits - 1) * factors).half()
    parts = rows, scales, factors**2 * ERROR_STEPS, bits
    found = compiled_choice(*parts)
    assert torch.equal(found, choice(*parts))
    assert {0, len(factors) - 1} <= set(found.unique().tolist())


@pytest.mark.parametrize(("numbers", "width"), [(1, 3), (17, 5), (64, 96)])
def test_errors_are_fed_back_by_the_definition(numbers, width):
    generator = np.random.default_rng(numbers)
    units = generator.normal(size=(2, numbers, width)).astype(np.float32) * 5
    factor = np.triu(generator.normal(size=(2, numbers, numbers)), 1).astype(np.float32) / 8
    found = np.empty(units.shape, np.int8)
    compiled.feed_back(units, factor, 4, found)
    targets = units.copy()
    for number in range(numbers):
        codes = np.clip(np.floor(targets[:, number]), -8, 7)
        np.testing.assert_array_equal(found[:, number], codes)
        error = units[:, number] - codes - np.float32(0.5)
        targets[:, number + 1 :] += factor[:, number, number + 1 :, None] * error[:, None]

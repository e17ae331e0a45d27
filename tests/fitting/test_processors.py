"""Fitted keys and values are nearly the same on processors that sum in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.attention_matching import Kept, corrections
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.slab_format import WIDE
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from tests.processors import settings

HEADS, QUERIES_PER_HEAD, DIM, SEGMENT, SEGMENTS, KEPT = 4, 168, 64, 128, 8, 96
SCALE = DIM**-0.5
LARGE_CHANNEL, LARGE = DIM // 2 - 1, 1000.0
"""A channel that is not rotated, and what all keys have there: it cancels in attention, but not in sums of float32."""


def fitted() -> dict[str, torch.Tensor]:
    """Corrected keys and values of random segments, whose keys have a mean of their own in each channel."""
    rng = np.random.default_rng(11)
    frequencies = 1e4 ** -(np.arange(DIM // 2) / (DIM // 2))
    frequencies[LARGE_CHANNEL] = 0
    queries = rng.normal(size=(HEADS, QUERIES_PER_HEAD, DIM)) + 0.7
    statistics = {
        QUERIES: queries,
        MASSES: rng.uniform(4, 7, size=(HEADS, 2, QUERIES_PER_HEAD))
        + LARGE * SCALE * queries[:, None, :, LARGE_CHANNEL],
        OUTPUTS: 0.3 * rng.normal(size=(HEADS, 2, QUERIES_PER_HEAD, DIM)),
        ROPE[0]: frequencies[None],
        ROPE[1]: np.arange(DIM, dtype=float)[None],
    }
    keys = 2 * rng.normal(size=(SEGMENTS, HEADS, SEGMENT, DIM)) + rng.normal(size=(HEADS, 1, DIM))
    keys[..., LARGE_CHANNEL] += LARGE
    values = rng.normal(size=keys.shape) + 2
    keys, values = (torch.from_numpy(x).float() for x in (keys, values))
    references = References.from_statistics(
        {name: torch.from_numpy(x).float() for name, x in statistics.items()}, SCALE
    )
    kept = Kept.from_counts([KEPT] * HEADS, SEGMENT, "cpu")
    found = corrections(keys, values, kept, torch.arange(SEGMENTS), references, WIDE, lambda rows: rows, torch_steps)
    assert (found.values != values[:, :, :KEPT]).any(dim=(2, 3)).float().mean() > 0.5, "few heads are corrected"
    return {"keys": found.keys, "values": found.values}


@pytest.mark.parametrize("setting", settings())
def test_processors_fit_alike(tmp_path, setting):
    path = tmp_path / "fitted.safetensors"
    command = [sys.executable, "-m", "tests.fitting.test_processors", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | settings()[setting]
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)
    here, there = fitted(), load_file(path)
    for name, most in (("keys", 1e-6), ("values", 5e-6)):
        difference = (here[name] - there[name]).square().mean().sqrt().item()
        assert difference < most, f"{name} differ by {difference:.1e} (root of mean square)"


if __name__ == "__main__":
    save_file({name: tensor.contiguous() for name, tensor in fitted().items()}, sys.argv[1])

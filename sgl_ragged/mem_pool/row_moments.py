"""Mean and spread of a head's kept keys in each channel. Torch: the oracle, and what runs on CPUs.

Keys have channels that are far from zero, or much wider than other channels, in every token: no rotation spreads what
all rows share. Without that part four bits are enough (per channel: KIVI, 2402.02750).

What rounding adds to a query's logits grows with a product of two sums over channels, that of the squared spreads and
that of the squared distances from the mean in spreads. By Cauchy and Schwarz it is least where the spread is the
square root of the distance, for queries that are alike in all channels: half of what would make channels alike.
"""

from __future__ import annotations

import torch

from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE

BLOCK = 16
"""Rows that are added at once; kept counts are multiples of it."""


def row_moments(keys: torch.Tensor) -> torch.Tensor:
    """Return mean and spread, float16 [..., 2, d], of the keys [..., kept, d] that heads keep here of a segment.

    The spread is the square root of the root mean square of the distances from the mean, which is rounded before. A
    channel that never changes has the least. Numbers beyond float16 count as its largest, and NaN as zero: one row
    that is undefined leaves the others alone.
    """
    kept = keys.shape[-2]
    x = keys.float().nan_to_num(0.0).clamp(-MOST_SCALE, MOST_SCALE)
    mean = (_total(x) / kept).half()
    distance = x - mean.float()[..., None, :]
    spread = (_total(distance * distance) / kept).sqrt().sqrt().clamp_min(LEAST_SCALE).half()
    return torch.stack([mean, spread], dim=-2)


def centred(keys: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Centre keys [..., kept, d]: subtract their mean and divide by their spread, in float32."""
    mean, spread = moments.float()[..., None, :].unbind(-3)
    return (keys.float() - mean) / spread


def _total(x: torch.Tensor) -> torch.Tensor:
    """Sum x [..., kept, d] over the rows in a fixed order, so that equal rows give equal bits.

    Block is added to block, then half to half: what `sum` does depends on strides and shapes.
    """
    total = torch.zeros_like(x[..., :BLOCK, :])
    for block in x.split(BLOCK, dim=-2):
        total = total + block
    width = BLOCK
    while width > 1:
        width //= 2
        total = total[..., :width, :] + total[..., width:, :]
    return total[..., 0, :]

"""Mean and root mean square of a segment's keys in each channel. Torch: the oracle, and what runs on CPUs.

Keys have channels that are far from zero, or much wider than others, in every token: no rotation spreads what all rows
of a segment have in common. Taken off, four bits are enough for what is left (per channel: KIVI, 2402.02750).
"""

from __future__ import annotations

import torch

from sgl_ragged.slab_format import LEAST_SCALE, MOST_SCALE

BLOCK = 16
"""Tokens that are added at once; segments are multiples of it."""


def segment_moments(keys: torch.Tensor) -> torch.Tensor:
    """float16 [..., 2 (mean, root mean square), d] of the keys [..., S, d] of whole segments, kept or not.

    The mean is rounded before the distances from it are squared, so what is left of every key is of the size that the
    root mean square says. A channel that never changes has the least. Numbers beyond float16 count as its largest, and
    NaN as zero: one row that is undefined leaves the others alone.
    """
    length = keys.shape[-2]
    x = keys.float().nan_to_num(0.0).clamp(-MOST_SCALE, MOST_SCALE)
    mean = (_total(x) / length).half()
    distance = x - mean.float()[..., None, :]
    spread = (_total(distance * distance) / length).sqrt().clamp(LEAST_SCALE, MOST_SCALE).half()
    return torch.stack([mean, spread], dim=-2)


def centred(keys: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """float32 like keys [..., kept, d]: less their segment's mean, in units of its root mean square."""
    mean, spread = moments.float()[..., None, :].unbind(-3)
    return (keys.float() - mean) / spread


def _total(x: torch.Tensor) -> torch.Tensor:
    """Sum of x [..., S, d] over S, in a fixed order: equal segments have equal bits, wherever they lie.

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

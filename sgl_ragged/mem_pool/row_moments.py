"""Mean and spread of a head's kept keys in each channel. Torch: the oracle, and what runs on CPUs.

Keys have channels that are far from zero, or much wider than other channels, in every token: no rotation spreads what
all rows share. Without that part four bits are enough (per channel: KIVI, 2402.02750).

What rounding adds to a query's logits grows with a product of two sums over channels, that of the squared spreads and
that of the squared distances from the mean in spreads. By Cauchy and Schwarz it is least where the spread is the
square root of the distance, for queries that are alike in all channels: half of what would make channels alike.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE

BLOCK = 16
"""Rows that are added at once; kept counts are multiples of it."""

LEAST_SHARE = 2.0**-6
"""Least root mean square distance of the rows that count, in units of that of all rows: a channel that only uncentred
rows change would else take all codes of these rows."""


def row_moments(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the moments of the keys [..., kept, d] that heads keep here of a segment.

    Returns:
        moments: float16 [..., 2 (mean, spread), d]. The spread is the square root of the root mean square of the
            distances from the mean, which is rounded before. A channel that never changes has the least.
        uncentred: bool [..., kept], rows that the mean is not subtracted from, and that it does not count: those that
            are nearer to zero than to the mean of all rows, channels in units of their root mean square distance from
            this mean. In most heads the first token of a sequence is one.

    Numbers beyond float16 count as its largest, and NaN as zero: one row that is undefined leaves the others alone.
    """
    kept = keys.shape[-2]
    x = keys.float().nan_to_num(0.0).clamp(-MOST_SCALE, MOST_SCALE)
    mean, widths = _mean_and_distances(x, kept)
    # Squared distance to zero less that to the mean.
    uncentred = _total_of_dims((2 * x - mean) * (mean / widths.clamp_min(LEAST_SCALE))) < 0
    counts = (~uncentred).float()[..., None]
    mean, distances = _mean_and_distances(x, counts.sum(dim=-2, keepdim=True).clamp_min(1.0), counts)
    # Rows that do not count are divided by the spread, too.
    spread = torch.maximum(distances, widths * LEAST_SHARE).sqrt().clamp_min(LEAST_SCALE).half()
    return torch.cat([mean.half(), spread], dim=-2), uncentred


def _mean_and_distances(
    x: torch.Tensor, count: torch.Tensor | int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of rows [..., kept, d], rounded to float16, and their root mean square distance from it, float32
    [..., 1, d]; of those rows alone whose `counts` [..., kept, 1] is 1."""
    mean = (_total(x if counts is None else x * counts) / count).half().float()
    distances = x - mean if counts is None else (x - mean) * counts
    return mean, (_total(distances * distances) / count).sqrt()


def centred(keys: torch.Tensor, moments: torch.Tensor, uncentred: torch.Tensor) -> torch.Tensor:
    """Subtract the mean from those keys [..., kept, d] that are not `uncentred`, and divide all by the spread, in
    float32."""
    mean, spread = moments.float()[..., None, :].unbind(-3)
    return (keys.float() - mean * (~uncentred)[..., None]) / spread


def _total(x: torch.Tensor) -> torch.Tensor:
    """Sum x [..., kept, d] over the rows, [..., 1, d], in a fixed order, so that equal rows give equal bits.

    Block is added to block, then half to half: what `sum` does depends on strides and shapes.
    """
    total = torch.zeros_like(x[..., :BLOCK, :])
    for block in x.split(BLOCK, dim=-2):
        total = total + block
    width = BLOCK
    while width > 1:
        width //= 2
        total = total[..., :width, :] + total[..., width:, :]
    return total


def _total_of_dims(x: torch.Tensor) -> torch.Tensor:
    """Sum x [..., d] over the dimensions, half to half."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    total = pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width:]
    return total[..., 0]

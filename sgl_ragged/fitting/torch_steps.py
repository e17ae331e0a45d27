"""Steps of fitting in torch, as `attention_matching.Steps` names them: the oracle of the kernels, and what CPUs run."""

from __future__ import annotations

import math

import torch

from sgl_ragged.fitting.attention_matching import Kept
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.quantise import largest_code, rotation_matrix
from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""What one kept token may count."""

STEPS = 8
"""Of the projected gradient: what is left of the mass is left to the values; more made outputs no better."""


def seen_from(references: References, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    return references.seen_from((numbers + 1) * length - 1, numbers == 0)


def weights(exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
    shares, missing = exps / whole, lost / whole
    gram = shares @ shares.transpose(-1, -2)
    linear = (shares @ missing.transpose(-1, -2))[..., 0]
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    unit = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    gram /= unit[..., None] * unit[..., None, :]
    # No eigenvalue is larger than the largest sum of a row.
    step = 1 / gram.sum(dim=-1).amax(dim=-1, keepdim=True)
    gram.mul_(-step[..., None]).diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear, low, high = linear / unit * step, (LEAST_WEIGHT - 1) * unit, (MOST_WEIGHT - 1) * unit
    now = ahead = torch.zeros_like(unit)
    momentum = 1.0
    for _ in range(STEPS):
        after = _moved(gram, ahead, linear).clamp_(low, high)
        momentum, last = (1 + math.sqrt(1 + 4 * momentum**2)) / 2, momentum
        ahead = torch.lerp(now, after, 1 + (last - 1) / momentum)
        now = after
    return (1 + now / unit)[..., None]


def _moved(matrix: torch.Tensor, vector: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """start [.., n] plus matrix [.., n, n] times vector [.., n]."""
    if matrix.device.type == "cpu":
        # LAPACK makes one product after the other, three times as slow.
        return (matrix * vector[..., None, :]).sum(dim=-1).add_(start)
    wide = (x.flatten(0, -2)[..., None] for x in (start, vector))
    return torch.baddbmm(next(wide), matrix.flatten(0, -3), next(wide)).view(start.shape)


def nearly_stored(
    rows: torch.Tensor, ranks: torch.Tensor | None, keys: torch.Tensor, kept: Kept, bits: int, centred: bool
) -> torch.Tensor:
    """`quantise.stored_keys` in few operations."""
    moments = None
    if centred:
        every = rows if ranks is None else keys.scatter(2, ranks[..., None].expand_as(rows), rows)
        moments = _moments(every, kept)
    matrix, most = rotation_matrix(rows.shape[-1], rows.device), largest_code(bits)
    turned = (rows if moments is None else (rows - moments[0]).div_(moments[1])) @ matrix
    scale = (turned.abs().amax(dim=-1, keepdim=True) / most).clamp_(LEAST_SCALE, MOST_SCALE).half().float()
    back = turned.div_(scale).round_().clamp_(-most, most).mul_(scale) @ matrix
    return back if moments is None else torch.addcmul(moments[0], back, moments[1])


def _moments(keys: torch.Tensor, kept: Kept) -> torch.Tensor:
    """float32 [2 (mean, spread), segments, heads, 1, d]: `row_moments` of keys [segments, heads, most, d], but for
    their last bits."""
    own = None if kept.own is None else kept.own.float()
    counts = kept.totals[..., None].float()
    mean = ((keys if own is None else keys * own).sum(dim=2, keepdim=True) / counts).half().float()
    distance = (keys - mean).square_()
    spread = ((distance if own is None else distance.mul_(own)).sum(dim=2, keepdim=True) / counts).sqrt_().sqrt_()
    return torch.stack([mean, spread.clamp_min_(LEAST_SCALE).half().float()])

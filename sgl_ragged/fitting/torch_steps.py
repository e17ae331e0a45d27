"""Steps of fitting in torch (`attention_matching.Steps`): implementation for CPUs and oracle of the kernels."""

from __future__ import annotations

import math

import torch

from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool import compiled

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""Range of the weight of a kept token."""

STEPS = 8
"""Number of projected-gradient steps. Values absorb the remaining error; more steps did not improve outputs."""


def seen_from(references: References, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Implement `Steps.seen_from`."""
    return references.seen_from((numbers + 1) * length - 1, numbers == 0)


def weights(exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
    """Implement `Steps.weights`."""
    shares, missing = exps / whole, lost / whole
    gram = shares @ shares.transpose(-1, -2)
    linear = (shares @ missing.transpose(-1, -2))[..., 0]
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    unit = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    gram /= unit[..., None] * unit[..., None, :]
    # The largest sum of a row bounds the eigenvalues.
    step = 1 / gram.sum(dim=-1).amax(dim=-1, keepdim=True)
    gram.mul_(-step[..., None]).diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear, low, high = linear / unit * step, (LEAST_WEIGHT - 1) * unit, (MOST_WEIGHT - 1) * unit
    point = extrapolated = torch.zeros_like(unit)
    momentum = 1.0
    for _ in range(STEPS):
        next_point = _multiply_add(gram, extrapolated, linear).clamp_(low, high)
        momentum, previous = (1 + math.sqrt(1 + 4 * momentum**2)) / 2, momentum
        extrapolated = torch.lerp(point, next_point, 1 + (previous - 1) / momentum)
        point = next_point
    return (1 + point / unit)[..., None]


def _multiply_add(matrix: torch.Tensor, vector: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Compute summand [.., n] plus matrix [.., n, n] times vector [.., n]."""
    if matrix.device.type == "cpu":
        # Batched products on CPUs run one after the other and take three times as long.
        return (matrix * vector[..., None, :]).sum(dim=-1).add_(summand)
    columns = (x.flatten(0, -2)[..., None] for x in (summand, vector))
    return torch.baddbmm(next(columns), matrix.flatten(0, -3), next(columns)).view(summand.shape)


def feed_back(units: torch.Tensor, factor: torch.Tensor, bits: int) -> torch.Tensor:
    """Implement `Steps.feed_back`, compiled on the CPU: torch would take a pass for each number."""
    values, factors = (x.flatten(0, -3).contiguous().cpu() for x in (units, factor))
    codes = torch.empty(values.shape, dtype=torch.int8)
    compiled.feed_back(values.numpy(), factors.numpy(), bits, codes.numpy())
    return codes.view(units.shape).to(units.device)

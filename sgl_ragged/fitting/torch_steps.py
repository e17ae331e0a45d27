"""Steps of fitting in torch (`attention_matching.Steps`): implementation for CPUs and oracle of the kernels."""

from __future__ import annotations

import math

import numpy as np
import torch

from sgl_ragged.fitting.references import References

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""Range of the weight of a kept token."""

STEPS = 8
"""Number of projected-gradient steps. Values absorb the remaining error; more steps did not improve outputs."""

AT_ONCE = 32
"""Numbers that are rounded before their errors are added to all later ones in one product of matrices."""


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
    """Implement `Steps.feed_back`, in numpy on the CPU: its small operations take a third of torch's time."""
    half, count = 2 ** (bits - 1), units.shape[-2]
    # Numbers first: what is rounded together is contiguous.
    values = units.flatten(0, -3).transpose(0, 1).contiguous().cpu().numpy()
    moved = factor.flatten(0, -3).permute(1, 2, 0).contiguous().cpu().numpy()[..., None]
    targets, codes, errors = values.copy(), np.empty_like(values), np.empty_like(values)
    scratch = np.empty_like(values[:AT_ONCE])
    for first in range(0, count, AT_ONCE):
        end = min(first + AT_ONCE, count)
        for number in range(first, end):
            code, error = codes[number], errors[number]
            np.floor(targets[number], out=code)
            np.maximum(code, -half, out=code)
            np.minimum(code, half - 1, out=code)
            np.subtract(values[number], code, out=error)
            np.subtract(error, 0.5, out=error)
            later = scratch[: end - number - 1]
            np.multiply(moved[number, number + 1 : end], error, out=later)
            np.add(targets[number + 1 : end], later, out=targets[number + 1 : end])
        if end < count:
            blocks = moved[first:end, end:, :, 0].transpose(2, 1, 0) @ errors[first:end].transpose(1, 0, 2)
            targets[end:] += blocks.transpose(1, 0, 2)
    rounded = torch.from_numpy(codes.astype(np.int8)).transpose(0, 1).reshape(units.shape)
    return rounded.to(units.device)

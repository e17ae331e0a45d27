"""What codes of few bits stand for, spelled out in float64 from their definition; shares no code with the package."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import block_diag, hadamard

BITS = {"int8": (8, 8), "k8v4": (8, 4), "k4v4": (4, 4)}
"""Of keys and values, by format."""

CENTRED = {"k4v4"}
"""Formats whose keys are stored less their segment's mean, in units of its root mean square."""


def rotation(dim: int) -> np.ndarray:
    """[d, d]: Hadamard matrices over blocks of the largest power of two that divides d, orthonormal."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    return block_diag(*[hadamard(size) / size**0.5] * (dim // size))


def restored(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 like x [..., d]: each row's rounded numbers."""
    matrix, most = rotation(x.shape[-1]), 2 ** (bits - 1) - 1
    rows = x.double().numpy() @ matrix
    scales = np.abs(rows).max(axis=-1, keepdims=True) / most
    scales = np.clip(scales, 2.0**-24, 65504.0).astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint(rows / scales), -most, most)
    return torch.from_numpy(codes * scales @ matrix)


def moments(keys: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """float64 mean and root mean square [..., 1, d] of keys [..., S, d], each rounded to float16."""
    x = np.clip(np.nan_to_num(keys.double().numpy(), nan=0.0), -65504.0, 65504.0)
    mean = x.mean(axis=-2, keepdims=True).astype(np.float16).astype(np.float64)
    spread = np.sqrt(((x - mean) ** 2).mean(axis=-2, keepdims=True))
    return mean, np.clip(spread, 2.0**-24, 65504.0).astype(np.float16).astype(np.float64)


def restored_segment(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 like keys [..., S, d], a whole segment's: as centred codes give them back."""
    mean, spread = moments(keys)
    rows = torch.from_numpy((keys.double().numpy() - mean) / spread)
    return restored(rows, bits) * torch.from_numpy(spread) + torch.from_numpy(mean)


def restored_pair(
    keys: torch.Tensor, values: torch.Tensor, form: str, segment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., T, d] as slabs of this format give them back; as they are for `wide`.

    segment: tokens of each; those of the last, if it is open, are nobody's past.
    """
    if form == "wide":
        return keys.double(), values.double()
    bits = BITS[form]
    if form not in CENTRED:
        return restored(keys, bits[0]), restored(values, bits[1])
    past = torch.cat([restored_segment(own, bits[0]) for own in keys.split(segment, dim=-2)], dim=-2)
    return past, restored(values, bits[1])

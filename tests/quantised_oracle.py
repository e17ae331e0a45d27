"""What codes of few bits stand for, spelled out in float64 from their definition; shares no code with the package."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import block_diag, hadamard

BITS = {"int8": (8, 8), "k8v4": (8, 4)}
"""Of keys and values, by format."""


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


def restored_pair(keys: torch.Tensor, values: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a slab of this format gives them back; as they are for `wide`."""
    if form == "wide":
        return keys.double(), values.double()
    return restored(keys, BITS[form][0]), restored(values, BITS[form][1])

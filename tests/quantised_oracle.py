"""What codes of few bits stand for, spelled out in float64 from their definition; shares no code with the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import block_diag, hadamard

BITS = {"int8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4), "k4v4": (4, 4)}
"""Of keys and values, by format."""

CENTRED = {"k6v4", "k4v4"}
"""Formats whose keys are stored less their mean, in units of their spread."""


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
    """float64 mean and spread [1, d] of the rows [kept, d], each rounded to float16."""
    x = np.clip(np.nan_to_num(keys.double().numpy(), nan=0.0), -65504.0, 65504.0)
    mean = x.mean(axis=0, keepdims=True).astype(np.float16).astype(np.float64)
    spread = ((x - mean) ** 2).mean(axis=0, keepdims=True) ** 0.25
    return mean, np.maximum(spread, 2.0**-24).astype(np.float16).astype(np.float64)


def restored_keys(keys: torch.Tensor, form: str) -> torch.Tensor:
    """float64 like keys [kept, d], all that a head keeps at one place: as a slab gives them back."""
    bits = BITS[form][0]
    if form not in CENTRED:
        return restored(keys, bits)
    mean, spread = (torch.from_numpy(x) for x in moments(keys))
    return restored((keys.double() - mean) / spread, bits) * spread + mean


def restored_past(
    keys: torch.Tensor,
    values: torch.Tensor,
    form: str,
    segment: int,
    kept: np.ndarray,
    parts: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [T, d] of a head as slabs give them back; as they are for `wide`.

    Args:
        segment: tokens of each; those of the last, if it is open, are nobody's past.
        kept: bool [T]. parts: of how many rows, where the head's are at several places.
    """
    if form == "wide":
        return keys.double(), values.double()
    past = keys.double().clone()
    for first in range(0, len(keys), segment):
        rows = torch.from_numpy(np.flatnonzero(kept[first : first + segment]) + first)
        for own in rows.split(list(parts)) if parts and len(rows) == sum(parts) else [rows]:
            if len(own):
                past[own] = restored_keys(keys[own], form)
    return past, restored(values, BITS[form][1])

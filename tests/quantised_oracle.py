"""Spell out codes of few bits from their definition, in numpy; shares no code with the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import block_diag, hadamard

BITS = {"int8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4), "k4v4": (4, 4)}
"""Of keys and values, by format."""

CENTRED = {"k6v4", "k4v4"}
"""Formats whose keys are stored less their mean, in units of their spread."""


def rotation_block(dim: int) -> int:
    """Return the largest power of two that divides `dim`."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    return size


def rotation(dim: int) -> np.ndarray:
    """float64 [d, d]: Hadamard matrices over blocks of the largest power of two that divides d, orthonormal."""
    size = rotation_block(dim)
    return block_diag(*[hadamard(size) / size**0.5] * (dim // size))


def rotated_single(x: np.ndarray) -> np.ndarray:
    """float32 like x [..., d]: `x @ rotation(d)` by sums and differences of pairs, each rounded to float32."""
    dim, size, width = x.shape[-1], rotation_block(x.shape[-1]), 1
    rows = x.astype(np.float32)
    while width < size:
        pairs = rows.reshape(*x.shape[:-1], dim // (2 * width), 2, width)
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        rows = np.stack([one + other, one - other], axis=-2).reshape(x.shape)
        width *= 2
    return rows * np.float32(size**-0.5)


def agreed(single: np.ndarray, exact: np.ndarray, error: float) -> np.ndarray:
    """Return `single` after a check that it is `exact` but for rounding in float32.

    A number in the middle between two codes goes to either, by its last bit. The format defines these bits, so the
    oracle rounds the numbers in float32 to codes, and float64 checks each of them before.

    Args:
        error: largest relative difference, and largest difference in units of the array's largest number.
    """
    largest = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    np.testing.assert_allclose(single, exact, rtol=error, atol=error * largest)
    return single


def restored(x: torch.Tensor, bits: int, single: np.ndarray | None = None) -> torch.Tensor:
    """Round rows to codes and back.

    Args:
        x: [..., d], float64 or narrower.
        bits: of a code.
        single: float32 [..., d], x as the format computes it; x itself by default.

    Returns:
        float64 [..., d].
    """
    matrix, most = rotation(x.shape[-1]), 2 ** (bits - 1) - 1
    single = x.float().numpy() if single is None else single
    rows = agreed(rotated_single(single), x.double().numpy() @ matrix, 1e-5)
    scales = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(most)
    scales = np.clip(scales, np.float32(2.0**-24), np.float32(65504.0)).astype(np.float16)
    codes = np.clip(np.rint(rows / scales.astype(np.float32)), -most, most)
    return torch.from_numpy(codes.astype(np.float64) * scales.astype(np.float64) @ matrix)


def total_single(x: np.ndarray) -> np.ndarray:
    """float32 [1, d]: sum of x [kept, d] in the format's order.

    Block of 16 rows is added to block, then half of a block to half.
    """
    blocks = np.concatenate([x, np.zeros((-len(x) % 16, x.shape[1]), x.dtype)]).reshape(-1, 16, x.shape[1])
    total = np.zeros_like(blocks[0])
    for block in blocks:
        total = total + block
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total


def moments(keys: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """float16 mean and spread [1, d] of the rows [kept, d]."""
    x = np.clip(np.nan_to_num(keys.float().numpy(), nan=0.0), np.float32(-65504.0), np.float32(65504.0))
    exact = x.astype(np.float64)
    mean = agreed(total_single(x) / np.float32(len(x)), exact.mean(axis=0, keepdims=True), 1e-5).astype(np.float16)
    squares = (x - mean.astype(np.float32)) ** 2
    spread = np.sqrt(np.sqrt(total_single(squares) / np.float32(len(x))))
    spread = agreed(spread, ((exact - mean.astype(np.float64)) ** 2).mean(axis=0, keepdims=True) ** 0.25, 1e-5)
    return mean, np.maximum(spread, np.float32(2.0**-24)).astype(np.float16)


def restored_keys(keys: torch.Tensor, form: str) -> torch.Tensor:
    """float64 like keys [kept, d], all that a head keeps at one place: as a slab gives them back."""
    bits = BITS[form][0]
    if form not in CENTRED:
        return restored(keys, bits)
    mean, spread = moments(keys)
    single = (keys.float().numpy() - mean.astype(np.float32)) / spread.astype(np.float32)
    mean, spread = (torch.from_numpy(x).double() for x in (mean, spread))
    return restored((keys.double() - mean) / spread, bits, single) * spread + mean


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

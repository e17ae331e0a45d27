"""Spell out codes of few bits from their definition, in numpy; shares no code with the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import block_diag, hadamard

BITS = {"int8": (8, 8)} | {f"k{keys}v{values}": (keys, values) for keys in (8, 6, 5, 4, 3) for values in (6, 5, 4, 3)}
"""Of keys and values, by format."""

CENTRED = {name for name, (keys, _) in BITS.items() if keys < 8}
"""Formats whose keys are stored less their mean, in units of their spread."""

FACTORS = {
    8: [1.0],
    6: [1.0, 0.95, 0.9],
    5: [1.0, 0.95, 0.9, 0.85],
    4: [1.0, 0.94, 0.88, 0.82, 0.76],
    3: [1.0, 0.92, 0.84, 0.76, 0.68, 0.6],
}
"""Scales that are tried, as shares of the largest."""


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


def best_levels(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels, float32 like rows [..., d], rotated, and scales, float16 [..., 1], with the least squared error."""
    half = 2 ** (bits - 1)
    largest = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(half)
    found, chosen, least = None, None, None
    for factor in FACTORS[bits]:
        scales = np.clip(largest * np.float32(factor), np.float32(2.0**-24), np.float32(65504.0)).astype(np.float16)
        units = rows / scales.astype(np.float32)
        levels = np.clip(np.floor(units), -half, half - 1) + np.float32(0.5)
        # Whole steps, so that the same scale wins in whatever order they are added.
        steps = np.square(units - levels) * (np.float32(factor) ** 2 * np.float32(2**13))
        errors = np.minimum(np.nan_to_num(steps), 2**16).astype(np.int64).sum(axis=-1, keepdims=True)
        if found is None:
            found, chosen, least = levels, scales, errors
        else:
            found, chosen = np.where(errors < least, levels, found), np.where(errors < least, scales, chosen)
            least = np.minimum(errors, least)
    return found, chosen


def restored(x: torch.Tensor, bits: int, single: np.ndarray | None = None) -> torch.Tensor:
    """Round rows to codes and back.

    Args:
        x: [..., d], float64 or narrower.
        bits: of a code.
        single: float32 [..., d], x as the format computes it; x itself by default.

    Returns:
        float64 [..., d].
    """
    matrix = rotation(x.shape[-1])
    single = x.float().numpy() if single is None else single
    rows = agreed(rotated_single(single), x.double().numpy() @ matrix, 1e-5)
    levels, scales = best_levels(rows, bits)
    return torch.from_numpy(levels.astype(np.float64) * scales.astype(np.float64) @ matrix)


def fed_back(rows: np.ndarray, scales: np.ndarray, bits: int, moments: np.ndarray) -> np.ndarray:
    """Round rows [n, w] in order, each error moving those that follow to where the quadratic form is least.

    Args:
        scales: broadcasts to [n, w]. moments: [n, n], the form; GPTQ's algorithm, with the factor of its inverse.
    """
    half, rows, rounded = 2 ** (bits - 1), rows.astype(np.float64).copy(), np.empty(rows.shape)
    scales = np.broadcast_to(scales.astype(np.float64), rows.shape)
    upper = np.linalg.cholesky(np.linalg.inv(moments)).T
    for number, row in enumerate(rows):
        level = np.clip(np.floor(row / scales[number]), -half, half - 1) + 0.5
        rounded[number] = level * scales[number]
        rows[number + 1 :] -= np.outer(upper[number, number + 1 :] / upper[number, number], row - rounded[number])
    return rounded


def restored_values(values: np.ndarray, bits: int, gram: np.ndarray) -> np.ndarray:
    """Values [n, d] in codes and back, errors fed back from the largest to the least weight.

    Args:
        gram: [n, n], second moments of the rows' weights with their ridge.
    """
    matrix = rotation(values.shape[1])
    rows = values @ matrix
    order = np.argsort(-np.diag(gram), kind="stable")
    _, scales = best_levels(rows.astype(np.float32), bits)
    rounded = np.empty_like(rows)
    rounded[order] = fed_back(rows[order], scales[order], bits, gram[np.ix_(order, order)])
    return rounded @ matrix


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


def moments(keys: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float16 mean and spread [1, d] of the rows [kept, d]; and bool [kept], rows that the mean is subtracted from."""
    x = np.clip(np.nan_to_num(keys.float().numpy(), nan=0.0), np.float32(-65504.0), np.float32(65504.0))
    exact = x.astype(np.float64)

    def mean_and_width(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = counts.astype(np.float32)[:, None]
        count = np.float32(max(counts.sum(), 1))
        true = exact[counts].mean(axis=0, keepdims=True) if counts.any() else 0 * exact[:1]
        mean = agreed(total_single(x * rows) / count, true, 1e-5).astype(np.float16)
        squares = (x * rows - mean.astype(np.float32) * rows) ** 2
        width = np.sqrt(total_single(squares) / count)
        true = ((exact[counts] - mean.astype(np.float64)) ** 2).sum(axis=0, keepdims=True) / count
        return mean, agreed(width, true**0.5, 1e-5)

    mean, widths = mean_and_width(np.ones(len(x), dtype=bool))
    wide = np.maximum(widths, np.float32(2.0**-24))
    terms = (2 * x - mean.astype(np.float32)) * (mean.astype(np.float32) / wide)
    size = 1
    while size < terms.shape[1]:
        size *= 2
    terms = np.pad(terms, ((0, 0), (0, size - terms.shape[1])))
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    counts = terms[:, 0] >= 0
    # What the sign stands for: the row is not nearer to zero than to the mean.
    own, wide = mean.astype(np.float64), wide.astype(np.float64)
    to_zero, to_mean = ((exact - middle) ** 2 / wide for middle in (0.0, own))
    nearer = to_zero.sum(axis=1) - to_mean.sum(axis=1)
    clear = np.abs(nearer) > 1e-5 * (to_zero + to_mean).sum(axis=1)
    np.testing.assert_array_equal(counts[clear], (nearer >= 0)[clear])
    mean, own_widths = mean_and_width(counts)
    spread = np.sqrt(np.maximum(own_widths, widths / np.float32(64)))
    return mean, np.maximum(spread, np.float32(2.0**-24)).astype(np.float16), counts


def restored_keys(keys: torch.Tensor, form: str, asked: np.ndarray | None = None) -> torch.Tensor:
    """float64 like keys [kept, d], all that a head keeps at one place: as a slab gives them back.

    Args:
        asked: [d, d], second moments of queries, where errors are fed back by them.
    """
    bits, mean, spread = BITS[form][0], np.zeros((1, keys.shape[1])), np.ones((1, keys.shape[1]))
    single = keys.float().numpy()
    if form in CENTRED:
        mean, spread, counts = moments(keys)
        mean = mean * counts[:, None]
        single = (single - mean.astype(np.float32)) / spread.astype(np.float32)
    mean, spread = (torch.from_numpy(x.astype(np.float64)) for x in (mean, spread))
    rows = (keys.double() - mean) / spread
    if asked is None:
        return restored(rows, bits, single) * spread + mean
    matrix = rotation(keys.shape[1])
    rotated = rows.numpy() @ matrix
    _, scales = best_levels(rotated.astype(np.float32), bits)
    form_of_errors = matrix @ (asked * (spread.T * spread).numpy()) @ matrix
    form_of_errors += 0.01 * np.diag(form_of_errors).mean() * np.eye(len(matrix))
    rounded = fed_back(rotated.T, scales.T, bits, form_of_errors).T
    return torch.from_numpy(rounded @ matrix) * spread + mean


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

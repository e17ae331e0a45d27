"""Compare numbers that were rounded to few digits, or computed from such."""

from __future__ import annotations

import math

import numpy as np


def unrounded(stored: np.ndarray, wanted: np.ndarray, step: float | None = None) -> np.ndarray:
    """Return the numbers nearest to `wanted` that are rounded to `stored`, in float64.

    Args:
        stored: numbers of a floating-point dtype, or multiples of `step`.
        wanted: float64, of the same shape.
    """
    exact = stored.astype(np.float64)
    if step is None:
        neighbours = (np.nextafter(stored, stored.dtype.type(end)).astype(np.float64) for end in (-np.inf, np.inf))
        least, most = ((exact + neighbour) / 2 for neighbour in neighbours)
    else:
        least, most = exact - step / 2, exact + step / 2
    return np.clip(wanted, least, most)


def mostly_close(found: np.ndarray, wanted: np.ndarray, share: float, atol: float, most: float) -> None:
    """Assert that at least a share of the differences is within `atol`, and each within `most`.

    Where two computations of a number differ in the last bit, it may be rounded to neighbours.
    """
    difference = np.sort(np.abs(found.astype(np.float64) - wanted).ravel())
    near = difference[: math.ceil(share * len(difference))]
    np.testing.assert_allclose(near, 0, rtol=0, atol=atol)
    assert difference[-1] <= most

"""Loops over numbers that torch would take many passes for on CPUs, compiled by numba when they are first needed.

They run on one thread, and add in the order of the loops.
"""

from __future__ import annotations

import numba
import numpy as np

_LOOPS = {"nogil": True, "error_model": "numpy"}
_f4, _i1, _i8 = numba.float32, numba.int8, numba.int64


@numba.njit([numba.void(_f4[:, :, ::1], _f4[:, :, ::1], numba.int64, _i1[:, :, ::1])], **_LOOPS)
def feed_back(units: np.ndarray, factor: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """Round numbers in order, each with the errors of those before it (`fitting.rounding.FeedBack`).

    Args:
        units: float32 [heads, n, w]. factor: float32 [heads, n, n].
        codes: int8 [heads, n, w], written.
    """
    heads, count, width = units.shape
    half, middle = np.float32(2 ** (bits - 1)), np.float32(0.5)
    top = half - np.float32(1)
    errors, targets = np.empty((count, width), np.float32), np.empty(width, np.float32)
    for head in range(heads):
        for number in range(count):
            targets[:] = units[head, number]
            for earlier in range(number):
                share = factor[head, earlier, number]
                for column in range(width):
                    targets[column] += share * errors[earlier, column]
            for column in range(width):
                code = min(max(np.floor(targets[column]), -half), top)
                codes[head, number, column] = np.int8(code)
                errors[number, column] = units[head, number, column] - code - middle


@numba.njit([numba.void(_f4[:, ::1], _f4[:, ::1], _f4[::1], numba.int64, _f4, _i8[::1])], **_LOOPS)
def best_of_scales(
    rows: np.ndarray, scales: np.ndarray, steps: np.ndarray, bits: int, most: float, best: np.ndarray
) -> None:
    """Choose the scale of each row with the least squared error, the first of equals (`quantise.best_scales`).

    Args:
        rows: float32 [n, d]. scales: float32 [candidates, n].
        steps: float32 [candidates], steps of a squared error in units of the scale. most: steps that a number counts at
            most.
        best: int64 [n], numbers of the chosen scales, written.
    """
    half, middle, none = np.float32(2 ** (bits - 1)), np.float32(0.5), np.float32(0)
    top = half - np.float32(1)
    for row in range(rows.shape[0]):
        least = np.int64(1) << 62
        for candidate in range(scales.shape[0]):
            scale, step, total = scales[candidate, row], steps[candidate], np.int32(0)
            for column in range(rows.shape[1]):
                number = rows[row, column] / scale
                error = number - min(max(np.floor(number), -half), top) - middle
                square = error * error * step
                # What is undefined counts nothing: comparisons with it are false.
                total += np.int32(min(square, most)) if square >= none else np.int32(0)
            if total < least:
                least, best[row] = np.int64(total), candidate

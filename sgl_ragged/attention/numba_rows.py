"""Rows of slabs and open segments as float32, for functions that numba compiles.

Written for LLVM's vectoriser. Indices are unsigned, since signed ones may wrap around. Rows are read by offset from
flat arrays, since views of rows count references. NaN and infinity are not assumed away.

Arguments in capitals are constants of a kernel: D, the head dimension; B, dimensions in a block of rotations. `rows` is
float32 [n, D], of which row b is written; `source` is all slabs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

NUMBERS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "fp8": np.uint8}
"""Kinds of numbers in a cache, and integers of their size. Those of FP8 are looked up in a table."""

OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
}
"""Sums may be in another order than in torch."""

inlined = numba.njit(inline="always", **OPTIONS)
"""Into a kernel, where bits and dimensions are constants."""

called = numba.njit(**OPTIONS)
"""For what gains nothing by constants: compiled once for all shapes."""

_U, _F, _I = numba.uint64, numba.float32, numba.int32
_ONE, _TWO = np.uint64(1), np.uint64(2)
_FLOAT16_UNIT = np.float32(2.0**112)


@called
def from_half(bits):
    """Return the float32 of a float16 given as 16 bits."""
    number = np.uint32(bits)
    # Exponents are too small by 112; that of infinity and NaN is the largest.
    top = np.uint32(0x7F800000) if number & np.uint32(0x7C00) == np.uint32(0x7C00) else np.uint32(0)
    shifted = (number & np.uint32(0x7FFF)) << np.uint32(13) | (number & np.uint32(0x8000)) << np.uint32(16) | top
    return np.uint32(shifted).view(np.float32) * _FLOAT16_UNIT


@inlined
def load_numbers(source, at, rows, b, bits, table, D, KIND):
    """Read a key or value of the cache's dtype from element `at` on.

    Args:
        bits: uint32 [n, D], the memory of `rows`. table: float32 [256], the numbers of FP8. KIND: place in NUMBERS.
    """
    for j in range(D):
        if KIND == 0:
            bits[b, j] = source[at + j]
        elif KIND == 1:
            bits[b, j] = np.uint32(source[at + j]) << np.uint32(16)
        elif KIND == 2:
            rows[b, j] = from_half(source[at + j])
        else:
            rows[b, j] = table[source[at + j]]


@inlined
def _load_plane(source, at, rows, b, D, B, WIDTH, UNIT, MIDDLE, ADD):
    """Unpack a row of a plane (`SlabFormat`) of WIDTH bits, 4, 2 or 1, times UNIT: add it to row b if ADD, else write
    it there less MIDDLE."""
    for block in range(D // B):
        first, count = block * B, B * _U(WIDTH) // _U(8)
        for j in range(count):
            byte, to = _I(source[at + block * count + j]), first + j
            if WIDTH == 4:
                x0, x1 = _F(byte & _I(15)), _F(byte >> _I(4))
                rows[b, to], rows[b, to + count] = x0 - MIDDLE, x1 - MIDDLE
            elif WIDTH == 2:
                for part in range(_U(4)):
                    number = _F((byte >> _I(part) * _I(2)) & _I(3)) * UNIT
                    place = to + part * count
                    rows[b, place] = rows[b, place] + number if ADD else number - MIDDLE
            else:
                for part in range(_U(8)):
                    rows[b, to + part * count] += _F((byte >> _I(part)) & _I(1)) * UNIT


@inlined
def load_codes(source, first, second, rows, b, D, B, FIRST, SECOND, MIDDLE):
    """Read a row of codes plus 1/2.

    Args:
        first, second: first bytes of the row in both planes, of FIRST and SECOND bits; SECOND is 0 where there is one.
        MIDDLE: 2^(bits - 1) - 1/2; codes of 8 bits are signed.
    """
    if FIRST == 8:
        for j in range(D):
            rows[b, j] = _F(np.int8(source[first + j])) + _F(0.5)
    else:
        _load_plane(source, first, rows, b, D, B, FIRST, _F(1), MIDDLE, 0)
        if SECOND:
            _load_plane(source, second, rows, b, D, B, SECOND, _F(1 << FIRST), MIDDLE, 1)


@called
def rotate(x, g, mixed, D, B, NORM):
    """Multiply row g of x, float32 [G, D], by the matrix of `quantise.rotated`: one step per bit of B, all alike.

    Args:
        mixed: float32 [D], scratch. NORM: B^(-1/2).
    """
    for block in range(D // B):
        first, half = block * B, B // _TWO
        width = _ONE
        while width < B:
            for j in range(half):
                one, other = x[g, first + _TWO * j], x[g, first + _TWO * j + _ONE]
                mixed[j] = one + other
                mixed[j + half] = one - other
            for j in range(B):
                x[g, first + j] = mixed[j]
            width *= _TWO
    for j in range(D):
        x[g, j] *= NORM

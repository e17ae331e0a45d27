"""Decode attention over slabs and open segments on CPUs, compiled by numba: one pass per request and head.

A pass goes over the kept rows of sealed segments, then over the open segment, with an online softmax. Queries are
turned once per segment in place of its keys, and outputs once. G is the number of queries per head; other capitals are
those of `numba_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np

from sgl_ragged.attention.numba_cache import compile_once
from sgl_ragged.attention.numba_rows import (
    NUMBERS,
    OPTIONS,
    called,
    from_half,
    inlined,
    load_codes,
    load_numbers,
    rotate,
)
from sgl_ragged.mem_pool.quantise import rotation_block
from sgl_ragged.mem_pool.slab_format import PLANES

ROWS = 16
"""Rows that are unpacked at once; kept counts are multiples of it."""

_U, _F, _I = numba.uint64, numba.float32, numba.int32
_ROWS, _LANES, _ONE, _TWO = np.uint64(ROWS), np.uint64(16), np.uint64(1), np.uint64(2)

SOURCES = [Path(__file__).with_name(name) for name in ("numba_decode.py", "numba_rows.py")]
"""Files whose code is in a kernel."""


@dataclass(frozen=True)
class DecodeShape:
    """Constants of a kernel.

    key_bits, value_bits, centred: of the slabs' format, 0 bits where it is wide. head_dim, q_per_kv, segment: as in
    `SlabStore`. numbers: one of NUMBERS.
    """

    key_bits: int
    value_bits: int
    centred: bool
    head_dim: int
    q_per_kv: int
    segment: int
    numbers: str


@inlined
def _multiply(queries, rows, count, logits, first, D, G):
    """Write products of queries [G, D] with `count` rows to logits [G, S], from column `first` on."""
    for b in range(count):
        for g in range(G):
            product = _F(0)
            for j in range(D):
                product += queries[g, j] * rows[b, j]
            logits[g, first + b] = product


@inlined
def _accumulate(sums, rows, count, weights, first, D, G):
    """Add `count` rows times weights [G, S], from column `first` on, to sums [G, D], four rows at a time."""
    fours = count // _U(4) * _U(4)
    for g in range(G):
        for b in range(_U(0), fours, _U(4)):
            at = first + b
            w0, w1, w2, w3 = weights[g, at], weights[g, at + _ONE], weights[g, at + _TWO], weights[g, at + _U(3)]
            for j in range(D):
                two = w0 * rows[b, j] + w1 * rows[b + _ONE, j]
                sums[g, j] += two + (w2 * rows[b + _TWO, j] + w3 * rows[b + _U(3), j])
        for b in range(fours, count):
            for j in range(D):
                sums[g, j] += weights[g, first + b] * rows[b, j]


@called
def _weigh(logits, count, best, total, of_codes, of_numbers, lanes, powers, powers_bits, D, G):
    """Turn logits, to base 2, into weights in units of the largest so far, and scale what was added before."""
    whole = count // _LANES * _LANES
    for g in range(G):
        most = best[g]
        if whole:
            for lane in range(_LANES):
                lanes[lane] = logits[g, lane]
            for i in range(_LANES, whole, _LANES):
                for lane in range(_LANES):
                    lanes[lane] = logits[g, i + lane] if logits[g, i + lane] > lanes[lane] else lanes[lane]
            for lane in range(_LANES):
                most = lanes[lane] if lanes[lane] > most else most
        for i in range(whole, count):
            most = logits[g, i] if logits[g, i] > most else most
        if most > best[g]:
            shrink = _F(2.0 ** (best[g] - most))
            total[g] *= shrink
            for j in range(D):
                of_codes[g, j] *= shrink
                of_numbers[g, j] *= shrink
            best[g] = most
        for i in range(count):
            # 2^x by the power of a whole number and a polynomial, which, unlike the library's, is vectorised.
            x = logits[g, i] - most
            least = x if x > _F(-126) else _F(-126)
            number = _I(least - _F(0.5))
            powers_bits[i] = (number + _I(127)) << _I(23)
            rest = least - _F(number)
            weight = _F(1.5403530e-4)
            weight = weight * rest + _F(1.3333558e-3)
            weight = weight * rest + _F(9.6181291e-3)
            weight = weight * rest + _F(5.5504109e-2)
            weight = weight * rest + _F(2.4022651e-1)
            weight = weight * rest + _F(6.9314718e-1)
            logits[g, i] = weight * rest + _F(1) if x == x else x
        added = _F(0)
        for i in range(count):
            logits[g, i] *= powers[i]
            added += logits[g, i]
        total[g] += added


@inlined
def _attend_numbers(source, keys, values, count, queries, state, rows, bits, table, D, G, KIND):
    """Attend to `count` rows of the cache's dtype from two places on."""
    best, total, of_codes, of_numbers, logits, lanes, powers, powers_bits = state
    for i in range(_U(0), count, _ROWS):
        some = min(_ROWS, count - i)
        for b in range(some):
            load_numbers(source, keys + (i + b) * D, rows, b, bits, table, D, KIND)
        _multiply(queries, rows, some, logits, i, D, G)
    _weigh(logits, count, best, total, of_codes, of_numbers, lanes, powers, powers_bits, D, G)
    for i in range(_U(0), count, _ROWS):
        some = min(_ROWS, count - i)
        for b in range(some):
            load_numbers(source, values + (i + b) * D, rows, b, bits, table, D, KIND)
        _accumulate(of_numbers, rows, some, logits, i, D, G)


_u1, _u2, _i4, _i8, _f4 = numba.uint8, numba.uint16, numba.int32, numba.int64, numba.float32


def _signature(numbers: numba.types.Type) -> numba.types.Type:
    """Return the types of the arguments of a kernel."""
    memory = numbers[::1], _u1[::1], _u2[::1], _i8
    layer = _i8, _i8, _i8[::1], _i8[::1], _u1[::1], _i8
    batch = _i8[::1], _i4[:, ::1], _i4[::1], _i4[:, ::1], _i4[::1]
    tensors = _f4[:, :, :, ::1], numbers[:, :, ::1], numbers[:, :, ::1], _f4[:, :, :, ::1], _f4[:, :, ::1]
    return numba.void(_i8, _i8, *memory, *layer, *batch, _f4, *tensors, _f4[::1])


@functools.cache
def compiled_decode(shape: DecodeShape) -> Callable[..., None]:
    """Compile the kernel of a shape, or take it from the cache folder; once per process.

    The kernel's arguments:
        first, end: of `batch * heads` pairs of a request and a head, those that it computes.
        numbers, octets, halves: all slabs in elements of the cache's dtype, bytes, and 16 bits; the same memory.
        slab_bytes: bytes of a slab.
        layer, heads: the layer's number, heads of a layer.
        kept, parts: int64 [heads], rows that heads keep here, and bytes from a slab's begin to their parts of it.
        attends_open: uint8 [heads], whether they attend to open segments here.
        page_tokens: tokens of an open segment in a page.
        requests, pages, open_offsets, slots, seen: as in `DecodeView`.
        scale: from products of queries and keys to logits to base 2.
        queries: float32 [batch, heads, q_per_kv, d].
        keys, values: [batch, heads, d], new tokens in elements of the cache's dtype, which are appended.
        output, lse: float32 [batch, heads, q_per_kv, d] and [batch, heads, q_per_kv], written: zeros and -inf where
            there is nothing to attend to, and for padding.
        table: float32 [256], what numbers of FP8 stand for.
    """
    G, D, SEGMENT = np.uint64(shape.q_per_kv), np.uint64(shape.head_dim), shape.segment
    KEY_BITS, VALUE_BITS, CENTRED = shape.key_bits, shape.value_bits, int(shape.centred)
    KIND, ITEMSIZE = list(NUMBERS).index(shape.numbers), np.uint64(np.dtype(NUMBERS[shape.numbers]).itemsize)
    K1, K2 = (*PLANES.get(KEY_BITS, (0,)), 0)[:2]
    V1, V2 = (*PLANES.get(VALUE_BITS, (0,)), 0)[:2]
    K1_BYTES, K2_BYTES, V1_BYTES, V2_BYTES = (np.uint64(shape.head_dim * bits // 8) for bits in (K1, K2, V1, V2))
    KEY_MIDDLE, VALUE_MIDDLE = (np.float32(2.0 ** (bits - 1) - 0.5) for bits in (KEY_BITS, VALUE_BITS))
    block = rotation_block(shape.head_dim)
    B, NORM, LOG2 = np.uint64(block), np.float32(block**-0.5), np.float32(np.log(2))

    def decode(
        first, end, numbers, octets, halves, slab_bytes, layer, heads, kept, parts, attends_open, page_tokens,
        requests, pages, open_offsets, slots, seen, scale, queries, keys, values, output, lse, table,
    ):  # fmt: skip
        best, total, bias = np.empty(G, np.float32), np.empty(G, np.float32), np.zeros(G, np.float32)
        of_codes, of_numbers = np.empty((G, D), np.float32), np.empty((G, D), np.float32)
        scaled, turned, mixed = np.empty((G, D), np.float32), np.empty((G, D), np.float32), np.empty(D, np.float32)
        logits, lanes = np.empty((G, SEGMENT), np.float32), np.empty(_LANES, np.float32)
        powers_bits, bits = np.empty(SEGMENT, np.int32), np.empty((_ROWS, D), np.uint32)
        powers, rows = powers_bits.view(np.float32), bits.view(np.float32)
        scales = np.empty((2, SEGMENT), np.float32)
        state = best, total, of_codes, of_numbers, logits, lanes, powers, powers_bits
        H, T, SLAB = _U(heads), _U(page_tokens), _U(slab_bytes)
        for task in range(first, end):
            request, head = _U(task // heads), _U(task % heads)
            lse[request, head] = -np.inf
            output[request, head] = 0
            count = _U(kept[head])
            if requests[request] <= 0:
                continue
            # In a page: [layers, 2 (K, V), heads, T, d].
            in_page, behind = (_U(layer) * _TWO * H + head) * T * D, H * T * D
            offset = _U(open_offsets[request])
            at = _U(pages[request, offset // T]) * (SLAB // ITEMSIZE) + in_page + offset % T * D
            for j in range(D):
                numbers[at + j] = keys[request, head, j]
                numbers[at + behind + j] = values[request, head, j]
            if count == 0:
                continue
            for g in range(G):
                best[g], total[g] = -np.inf, 0
                for j in range(D):
                    scaled[g, j] = turned[g, j] = queries[request, head, g, j] * scale
                    of_codes[g, j] = of_numbers[g, j] = 0
                if KEY_BITS and not CENTRED:
                    rotate(turned, g, mixed, D, B, NORM)
            for k in range(_U(seen[request])):
                at = _U(slots[request, k]) * SLAB + _U(parts[head])
                if KEY_BITS == 0:
                    at //= ITEMSIZE
                    _attend_numbers(numbers, at, at + count * D, count, scaled, state, rows, bits, table, D, G, KIND)
                    continue
                if CENTRED:
                    moments = at // _TWO
                    for j in range(D):
                        rows[0, j] = from_half(halves[moments + j])
                        rows[1, j] = from_half(halves[moments + D + j])
                    for g in range(G):
                        product = _F(0)
                        for j in range(D):
                            product += scaled[g, j] * rows[0, j]
                            turned[g, j] = scaled[g, j] * rows[1, j]
                        bias[g] = product
                        rotate(turned, g, mixed, D, B, NORM)
                    at += _U(4) * D
                more_keys = at + count * K1_BYTES
                codes = more_keys + count * K2_BYTES
                more_codes = codes + count * V1_BYTES
                pairs = (more_codes + count * V2_BYTES) // _TWO
                for i in range(count):
                    scales[0, i] = from_half(halves[pairs + _TWO * i])
                    scales[1, i] = from_half(halves[pairs + _TWO * i + _ONE])
                for i in range(_U(0), count, _ROWS):
                    for b in range(_ROWS):
                        one, other = at + (i + b) * K1_BYTES, more_keys + (i + b) * K2_BYTES
                        load_codes(octets, one, other, rows, b, D, B, K1, K2, KEY_MIDDLE)
                    _multiply(turned, rows, _ROWS, logits, i, D, G)
                for g in range(G):
                    for i in range(count):
                        # The sign says whether the mean was subtracted.
                        scale_of = scales[0, i]
                        logits[g, i] = logits[g, i] * abs(scale_of) + (bias[g] if scale_of > 0 else _F(0))
                _weigh(logits, count, best, total, of_codes, of_numbers, lanes, powers, powers_bits, D, G)
                for g in range(G):
                    for i in range(count):
                        logits[g, i] *= scales[1, i]
                for i in range(_U(0), count, _ROWS):
                    for b in range(_ROWS):
                        one, other = codes + (i + b) * V1_BYTES, more_codes + (i + b) * V2_BYTES
                        load_codes(octets, one, other, rows, b, D, B, V1, V2, VALUE_MIDDLE)
                    _accumulate(of_codes, rows, _ROWS, logits, i, D, G)
            length = offset + _ONE if attends_open[head] else _U(0)
            for start in range(_U(0), length, T):
                at = _U(pages[request, start // T]) * (SLAB // ITEMSIZE) + in_page
                some = min(T, length - start)
                _attend_numbers(numbers, at, at + behind, some, scaled, state, rows, bits, table, D, G, KIND)
            for g in range(G):
                if KEY_BITS:
                    rotate(of_codes, g, mixed, D, B, NORM)
                if total[g] == 0:
                    continue
                lse[request, head, g] = (best[g] + np.log2(total[g])) * LOG2
                for j in range(D):
                    output[request, head, g, j] = (of_codes[g, j] + of_numbers[g, j]) / total[g]

    signature = _signature(numba.from_dtype(np.dtype(NUMBERS[shape.numbers])))
    return compile_once(decode, signature, OPTIONS, shape, SOURCES)

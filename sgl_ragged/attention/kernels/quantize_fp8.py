"""Convert keys and values for an FP8 cache: divided by the layer's scales and saturated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.mem_pool.kv_dtype import KvScales

MOST_BLOCK = 1024
"""Elements that one CTA of `quantize_fp8` converts."""


@triton.jit
def _as_e5m2(x):
    """x, at most the largest number of E5M2 in size, or NaN, rounded to it, ties to even; NaN is 0x7F.

    By integers: before compute capability 8.9 Triton converts in software, which rounds ties away from zero and makes
    -0.0 of NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Two bits of the mantissa stay; exponents count from 15 in place of 127.
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
    # Below 2^-14 numbers are multiples of 2^-16, as are float32 numbers from 128 to 256.
    small = (tl.abs(x) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
    code = tl.where(size < 0x38800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def as_fp8(x, reciprocal, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """x * reciprocal in float32, brought to [-LARGEST, LARGEST], as DTYPE; NaN stays NaN. As `kv_dtype.to_fp8`."""
    x = tl.clamp(x.to(tl.float32) * reciprocal, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if DTYPE == tl.float8e5:  # noqa: SIM300
        return _as_e5m2(x)
    else:
        return x.to(DTYPE)


@triton.jit
def quantize_fp8_kernel(
    keys_ptr,
    values_ptr,
    stored_keys_ptr,
    stored_values_ptr,
    key_reciprocal,
    value_reciprocal,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < WIDTH
    cache: tl.constexpr = stored_keys_ptr.dtype.element_ty
    keys = tl.load(keys_ptr + token * key_stride + element, mask=inside)
    values = tl.load(values_ptr + token * value_stride + element, mask=inside)
    at = token * WIDTH + element
    tl.store(stored_keys_ptr + at, as_fp8(keys, key_reciprocal, cache, LARGEST), mask=inside)
    tl.store(stored_values_ptr + at, as_fp8(values, value_reciprocal, cache, LARGEST), mask=inside)


def reciprocals(scales: KvScales) -> tuple[float, float]:
    """Return the factors of keys and values."""
    return 1 / scales.keys, 1 / scales.values


def quantize_fp8(
    keys: torch.Tensor, values: torch.Tensor, scales: KvScales, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, heads, d] in FP8, contiguous; the token strides of what is given may be any."""
    stored_keys, stored_values = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (keys, values))
    tokens, heads, dim = keys.shape
    block = min(triton.next_power_of_2(heads * dim), MOST_BLOCK)
    if tokens:
        quantize_fp8_kernel[(tokens, triton.cdiv(heads * dim, block))](
            keys,
            values,
            stored_keys,
            stored_values,
            *reciprocals(scales),
            keys.stride(0),
            values.stride(0),
            WIDTH=heads * dim,
            BLOCK=block,
            LARGEST=torch.finfo(dtype).max,
            num_warps=4,
        )
    return stored_keys, stored_values

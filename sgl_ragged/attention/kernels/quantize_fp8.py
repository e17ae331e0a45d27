"""Keys and values as an FP8 cache holds them: divided by the layer's scales and saturated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.mem_pool.kv_dtype import KvScales

MOST_BLOCK = 1024
"""Elements that one CTA of `quantize_fp8` converts."""


@triton.jit
def saturated(x, reciprocal, LARGEST: tl.constexpr):
    """x * reciprocal in float32, brought to [-LARGEST, LARGEST]; NaN stays NaN. As `kv_dtype.to_fp8`."""
    return tl.clamp(x.to(tl.float32) * reciprocal, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


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
    keys = saturated(tl.load(keys_ptr + token * key_stride + element, mask=inside), key_reciprocal, LARGEST)
    values = saturated(tl.load(values_ptr + token * value_stride + element, mask=inside), value_reciprocal, LARGEST)
    at = token * WIDTH + element
    tl.store(stored_keys_ptr + at, keys.to(stored_keys_ptr.dtype.element_ty), mask=inside)
    tl.store(stored_values_ptr + at, values.to(stored_values_ptr.dtype.element_ty), mask=inside)


def reciprocals(scales: KvScales) -> tuple[float, float]:
    """Factors of keys and values."""
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

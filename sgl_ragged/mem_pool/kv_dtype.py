"""Dtypes of the cache: as wide as the model's, or FP8 with a scale per layer. Without SGLang."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_ragged.errors import RaggedConfigError

WIDE = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KV_DTYPES = (*WIDE, *FP8)
"""Dtypes that slabs and tails can hold."""


@dataclass(frozen=True)
class KvScales:
    """Factors of the numbers that one layer stores in FP8; a wide cache does not use them.

    Raises:
        RaggedConfigError: a scale is not a positive number that can be divided by.
    """

    keys: float = 1.0
    values: float = 1.0

    def __post_init__(self) -> None:
        for scale in (self.keys, self.values):
            if not (math.isfinite(scale) and scale >= torch.finfo(torch.float32).tiny):
                raise RaggedConfigError(
                    f"{scale} is no scale of an FP8 KV cache: it must be positive and finite; mend the checkpoint's "
                    f"scales, or pass --kv-cache-dtype bfloat16"
                )


def describe_scales(scales: Sequence[KvScales]) -> str:
    """Return the smallest and largest scale of all layers, in words."""
    keys, values = [one.keys for one in scales], [one.values for one in scales]
    return f"scales of keys {min(keys):g} to {max(keys):g}, of values {min(values):g} to {max(values):g}"


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8


def beside_cache(cache: torch.dtype, model: torch.dtype) -> torch.dtype:
    """Return the dtype of queries that are stored for scorers: the cache's, or the model's if the cache is FP8."""
    return model if is_fp8(cache) else cache


def to_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return x / scale in FP8, saturated to the largest number with its sign; NaN stays NaN.

    It is multiplied by the reciprocal, in float32, as in `attention.kernels.quantize_fp8`: so both give the same bits.
    """
    most = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-most, most).to(dtype)


def movable(x: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype for which torch can move elements: FP8 as bytes, any other dtype unchanged."""
    return x.view(torch.uint8) if is_fp8(x.dtype) else x


def refuse_kv_dtype(dtype: torch.dtype) -> None:
    """Raise RaggedConfigError unless the pool can store this dtype; for the one that SGLang has resolved."""
    if dtype not in KV_DTYPES:
        raise RaggedConfigError(
            f"SGLang resolved the KV cache's dtype to {str(dtype).removeprefix('torch.')}, which --kv-pool ragged does "
            f"not store; pass --kv-cache-dtype bfloat16"
        )

"""All codecs of the host tier by name."""

from __future__ import annotations

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.fp8_codec import Fp8Codec
from sgl_ragged.features.host_tier.shared_codec import SharedCodec
from sgl_ragged.features.host_tier.slab_codec import ExactCodec, SlabCodec
from sgl_ragged.mem_pool.kv_dtype import is_fp8
from sgl_ragged.mem_pool.layout import SlabLayout

CODECS: dict[str, type[SlabCodec]] = {codec.name: codec for codec in (ExactCodec, Fp8Codec, SharedCodec)}
"""Codec classes by the names in `tier_plan.CODEC_NAMES`."""


def make_codec(name: str, layout: SlabLayout, dtype: torch.dtype) -> SlabCodec:
    """Make the codec of a name, for slabs of a cache of a dtype.

    Raises:
        RaggedConfigError: the codec does not support the layout, or the slabs are FP8 or quantised. Rounding these
            again saves nothing, and scales differ between layers, so no layer can be restored from another layer.
    """
    if layout.form.quantised:
        if not CODECS[name].exact:
            raise RaggedConfigError(
                f"--ragged-host-codec {name} is for slabs of numbers, and those in {layout.form.name} are codes "
                f"already; use exact, or --ragged-slab-dtype wide"
            )
        return CODECS[name](layout, torch.uint8)
    if is_fp8(dtype) and not CODECS[name].exact:
        raise RaggedConfigError(
            f"--ragged-host-codec {name} is for a KV cache that is wider than FP8; use exact, or --kv-cache-dtype "
            f"bfloat16"
        )
    return CODECS[name](layout, dtype)

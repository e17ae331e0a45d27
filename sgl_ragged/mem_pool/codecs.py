"""All codecs of the host tier by name."""

from __future__ import annotations

from sgl_ragged.mem_pool.fp8_codec import Fp8Codec
from sgl_ragged.mem_pool.shared_codec import SharedCodec
from sgl_ragged.mem_pool.slab_codec import ExactCodec, SlabCodec

CODECS: dict[str, type[SlabCodec]] = {codec.name: codec for codec in (ExactCodec, Fp8Codec, SharedCodec)}
"""The classes behind `plan.CODEC_NAMES`."""

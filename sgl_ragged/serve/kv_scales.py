"""Scales of an FP8 cache, as SGLang leaves them on a model's attention layers once the weights are loaded."""

from __future__ import annotations

from sglang.srt.layers.radix_attention import RadixAttention

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import KvScales


def kv_scales(layers: list[RadixAttention], path: str | None) -> list[KvScales]:
    """Return the FP8 scales of each layer, 1 where neither the checkpoint nor a file with scales gives any.

    path: --quantization-param-path.

    Raises:
        RaggedConfigError: SGLang has read none from that file, of which it only warns.
    """
    if path is not None and any(layer.k_scale is None for layer in layers):
        raise RaggedConfigError(
            f"SGLang took no scales from --quantization-param-path {path}: it reads them for --kv-cache-dtype fp8_e4m3 "
            f"alone, and leaves out a file that does not fit the model (the log says why); mend it, or drop the flag"
        )
    return [_of_layer(layer) for layer in layers]


def _of_layer(layer: RadixAttention) -> KvScales:
    # The model loader leaves floats; what reads --quantization-param-path leaves only k_scale and v_scale.
    found = (
        next((float(scale) for scale in both if scale is not None), 1.0)
        for both in ((layer.k_scale_float, layer.k_scale), (layer.v_scale_float, layer.v_scale))
    )
    return KvScales(*found)

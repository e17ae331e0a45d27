"""Models with sliding-window layers: SGLang's hybrid pool, with slabs as its part for full attention."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_ragged.profiles.geometry import WindowedLayers
from sgl_ragged.serve.pool import RaggedTokenToKVPool


class RaggedHybridPool(SWAKVPool):
    """Pool of slabs and of pages for sliding-window layers; SGLang's allocator and tree handle both."""

    def __init__(
        self,
        slabs: RaggedTokenToKVPool,
        windowed: WindowedLayers,
        layer_numbers: tuple[int, ...],
        *,
        window_tokens: int,
        num_heads: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """
        Args:
            slabs: keys and values of the layers `layer_numbers`.
            window_tokens: tokens that the sliding-window layers have pages for.
            num_heads: their heads on this rank.
        """
        super().__init__(
            size=slabs.size,
            size_swa=window_tokens,
            page_size=slabs.page_size,
            dtype=dtype,
            head_num=num_heads,
            head_dim=slabs.head_dim,
            swa_attention_layer_ids=list(windowed.layers),
            full_attention_layer_ids=list(layer_numbers),
            device=device,
            full_kv_pool_class=lambda **_: slabs,
            enable_alt_stream=False,
        )
        # SGLang's backends look at the buffer of this layer for its shape, and slabs have no such buffer.
        self.start_layer = windowed.layers[0]

"""Models with sliding-window layers: SGLang's hybrid pool, with slabs as its part for full attention."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_ragged.plugin.pool import RaggedTokenToKVPool
from sgl_ragged.profiles.geometry import ModelGeometry, WindowedLayers
from sgl_ragged.windows.sizes import WindowNeeds, window_pages


def eviction_interval() -> int:
    """Tokens that leave the windows of a request before SGLang frees pages of them."""
    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def window_needs(
    geometry: ModelGeometry, *, ranks: int, itemsize: int, segment: int, chunk: int, share: float | None, bounded: bool
) -> WindowNeeds | None:
    """What the model's sliding-window layers need on one rank; None without such layers.

    Args:
        itemsize: bytes per element of the KV dtype.
        chunk: tokens of a chunk of prefill, at most.
        share: --swa-full-tokens-ratio, if it was given.
        bounded: whether histories are.
    """
    windowed = geometry.windowed
    if windowed is None:
        return None
    # With more ranks than heads, every rank has a head of its own.
    elements = windowed.elements_per_token // min(ranks, geometry.num_heads)
    per_prefix = -(-windowed.window // segment)
    # Behind its bound a prompt waits for its next chunk with its window outside the tree, where nobody can evict it.
    waiting = per_prefix if bounded else 0
    return WindowNeeds(
        page_bytes=elements * itemsize * segment,
        per_prefix=per_prefix,
        per_request=window_pages(windowed.window, eviction_interval(), segment),
        in_flight=-(-chunk // segment) + 1 + waiting,
        share=share,
    )


class RaggedHybridPool(SWAKVPool):
    """Pages of sliding-window layers beside slabs: SGLang's allocator hands out both, and its tree knows of both."""

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


def slab_pool(pool: Any) -> Any:
    """The pool of slabs: what a hybrid pool holds as its part for full attention, or the pool itself."""
    return pool.full_kv_pool if isinstance(pool, RaggedHybridPool) else pool


def slab_allocator(allocator: Any) -> Any:
    """The allocator of slabs: what a hybrid allocator holds, or the allocator itself."""
    return getattr(allocator, "full_attn_allocator", allocator)

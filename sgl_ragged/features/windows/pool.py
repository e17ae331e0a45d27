"""Models with sliding-window layers: SGLang's hybrid pool and its allocator, with slabs for full attention."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

from sgl_ragged.profiles.geometry import WindowedLayers
from sgl_ragged.serve.allocator import (
    SlabAllocator,
    clipped_new_tokens,
    decode_tokens,
    extend_tokens,
    lists,
)
from sgl_ragged.serve.pool import RaggedTokenToKVPool, slab_pool
from sgl_ragged.serve.prefill_budget import HybridBudget
from sgl_ragged.serve.sglang_pools import SWAKVPool


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
            num_heads: heads of the sliding-window layers on this rank.
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
        # SGLang's backends read the shape of this layer's buffer, and slabs have no buffer for a single layer.
        self.start_layer = windowed.layers[0]


class HybridAllocator(SWATokenToKVPoolAllocator):
    """Allocator of pages of slabs (`serve.allocator.SlabAllocator`) and of sliding-window layers."""

    full_attn_allocator: SlabAllocator

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        windows = self.full_attn_allocator
        self.full_attn_allocator = SlabAllocator(
            windows.size,
            page_size=self.page_size,
            dtype=self.dtype,
            device=self.device,
            kvcache=slab_pool(self._kvcache),
            need_sort=self.need_sort,
        )

    def alloc_extend(
        self, prefix_lens: Any, prefix_lens_cpu: Any, seq_lens: Any, seq_lens_cpu: Any, *args: Any, **more: Any
    ) -> torch.Tensor | None:
        demand = extend_tokens(self.full_attn_allocator, prefix_lens_cpu, seq_lens_cpu) // self.page_size
        if not self._enough(demand, prefix_lens_cpu, seq_lens_cpu):
            return None
        return super().alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, *args, **more)

    def _enough(self, demand: int, prefix_lens_cpu: Any, seq_lens_cpu: Any) -> bool:
        """Return True if slabs have enough pages; SGLang asserts it wherever windows have enough."""
        size = self.page_size
        new = sum(
            -(-end // size) + -prefix // size for prefix, end in zip(*lists(prefix_lens_cpu, seq_lens_cpu), strict=True)
        )
        return new + demand <= self.full_attn_allocator.available_size() // size

    def create_prefill_budget(self, tree_cache: Any, **more: Any) -> Any:
        self.full_attn_allocator.begin_batch()
        return HybridBudget(self, tree_cache, **more)

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        return self.full_attn_allocator.request_slot_reserve(
            has_req_pool_slot=has_req_pool_slot, prefill_tokens=prefill_tokens
        )

    def max_new_tokens_for_memory(self, *args: Any, **more: Any) -> int | None:
        return clipped_new_tokens(self.full_attn_allocator, super().max_new_tokens_for_memory, *args, **more)

    def get_extend_allocation_demand(self, prefix_lens_cpu: Any, seq_lens_cpu: Any, **more: Any) -> int:
        tokens = super().get_extend_allocation_demand(prefix_lens_cpu, seq_lens_cpu, **more)
        return tokens + extend_tokens(self.full_attn_allocator, prefix_lens_cpu, seq_lens_cpu)

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any, requests: Any = None, **more: Any) -> bool:
        open_tokens = decode_tokens(self.full_attn_allocator, requests)
        self.evict_to_free_tokens(tree_cache, num_tokens + open_tokens)
        windows = self.swa_req_ring or self.swa_available_size() >= num_tokens
        return windows and self.full_available_size() >= num_tokens + open_tokens

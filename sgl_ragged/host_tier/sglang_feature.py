"""The host tier, as a feature of the server. SGLang 0.5.22 lacks some of what it needs."""

from __future__ import annotations

from sgl_ragged.plugin.seams import ADAPTER_ID, RUN_BATCH, Feature, Seam

CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache"

HOST_TIER = Feature(
    planned=lambda plan: plan.tier is not None,
    asked=" with --enable-hierarchical-cache",
    seams=(
        ADAPTER_ID,
        Seam("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.register_stack_strategy", ("strategy",)),
        Seam(f"{CONTROLLER}.start_writing", ("self",)),
        Seam(f"{CONTROLLER}.start_loading", ("self",)),
        Seam(f"{CONTROLLER}._generic_page_get", ("self", "operation", "hash_values", "host_indices", "extra_info")),
        Seam(
            f"{HOST_POOL}.__init__",
            (
                *("self", "dtype", "device_capacity_tokens", "size_per_token", "start_layer", "end_layer"),
                *("host_to_device_ratio", "host_size", "page_size", "layout", "pin_memory", "device", "allocator_type"),
                *("dcp_size", "dcp_rank", "pool_label", "is_dummy", "host_token_capacity"),
            ),
        ),
        Seam(f"{HOST_POOL}._allocate_host_buffer", ("self",)),
        Seam(*RUN_BATCH, "host_tier.sglang_hooks.recompute_segments"),
    ),
)

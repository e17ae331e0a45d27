"""Models with sliding windows, as a feature of the server."""

from __future__ import annotations

from sgl_ragged.plugin.seams import Feature, Seam

POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"

WINDOWS = Feature(
    planned=lambda plan: plan.geometry.windowed is not None,
    asked=" for models with sliding windows",
    seams=(
        Seam(
            f"{POOL}.__init__",
            (
                *("self", "size", "size_swa", "page_size", "dtype", "head_num", "head_dim", "swa_attention_layer_ids"),
                *("full_attention_layer_ids", "device", "token_to_kv_pool_class", "full_kv_pool_class"),
                *("swa_kv_pool_class", "full_kv_pool_kwargs", "swa_kv_pool_kwargs", "enable_memory_saver", "kwargs"),
            ),
        ),
        Seam(f"{POOL}.translate_loc_from_full_to_swa", ("self", "kv_indices")),
        Seam(f"{POOL}.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
        Seam(
            "sglang.srt.layers.attention.triton_backend.update_sliding_window_buffer",
            (
                *(
                    "window_kv_indptr",
                    "translator",
                    "plan",
                    "req_pool_indices",
                    "sliding_window_size",
                    "seq_lens",
                    "bs",
                ),
                *("device", "token_to_kv_pool", "window_kv_indices"),
            ),
        ),
    ),
)

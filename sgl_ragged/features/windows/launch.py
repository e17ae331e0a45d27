"""Models with sliding windows, as a feature of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sgl_ragged.launch.feature import Feature, Prefill, Rank, Seam, Worker
from sgl_ragged.launch.start import NODES, SPLIT, Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages
from sgl_ragged.serve.hooks import budget_seams

POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"

ONE_POOL = "--disable-hybrid-swa-memory"


class Windows(Feature):
    """Settings: `profiles.geometry.WindowedLayers`."""

    name = "windows"
    case = "sliding-window layers"
    # What their layers run on, or torch with the same masks.
    known_backend = "triton"
    needed_for = " for models with sliding windows"
    cases: ClassVar[Mapping] = {ONE_POOL: lambda launch: launch.server_args.disable_hybrid_swa_memory}
    conflicts = (
        Conflict(ONE_POOL, case, "it keeps everything of them, and slabs are for other layers", "drop it"),
        Conflict(NODES, case, "they have not been run over nodes", "use one"),
        Conflict(SPLIT, case, "it changes the number of heads of all layers, and these keep theirs", "use permute"),
    )
    seams = (
        Seam(
            f"{POOL}.__init__",
            (
                *("self", "size", "size_swa", "page_size", "dtype", "head_num", "head_dim", "swa_attention_layer_ids"),
                *("full_attention_layer_ids", "device", "token_to_kv_pool_class", "full_kv_pool_class"),
                *("swa_kv_pool_class", "full_kv_pool_kwargs", "swa_kv_pool_kwargs", "enable_memory_saver", "kwargs"),
            ),
        ),
        *budget_seams("SWAPrefillBudget"),
        Seam(f"{POOL}.translate_loc_from_full_to_swa", ("self", "kv_indices")),
        Seam(f"{POOL}.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
        Seam(
            "sglang.srt.layers.attention.triton_backend.update_sliding_window_buffer",
            (
                *("window_kv_indptr", "translator", "plan", "req_pool_indices", "sliding_window_size", "seq_lens"),
                *("bs", "device", "token_to_kv_pool", "window_kv_indices"),
            ),
            "sgl_ragged.features.windows.serve.make_room",
        ),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.geometry is not None and launch.geometry.windowed is not None

    def settle(self, launch: Launch) -> Any:
        from sgl_ragged.features.windows.window_needs import keep_apart

        return keep_apart(launch)

    def side_pages(self, settings: Any, rank: Rank, prefill: Prefill) -> SidePages:
        from sgl_ragged.features.history.launch import HISTORY
        from sgl_ragged.features.windows.window_needs import asked_share, window_needs

        return window_needs(
            rank.plan.geometry,
            ranks=rank.plan.ranks,
            itemsize=rank.itemsize,
            segment=rank.plan.segment,
            chunk=prefill.chunk,
            share=asked_share(prefill.schedule),
            bounded=HISTORY.of(rank.plan) is not None,
        )

    def pool_config(self, tokens: int, page_tokens: int) -> dict[str, int]:
        return {"full_max_total_num_tokens": tokens, "swa_max_total_num_tokens": page_tokens}

    def page_tokens(self, sizes: Any) -> int:
        return sizes.swa_max_total_num_tokens

    def allocator(self, found: Any, kvcache: Any, settings: dict[str, Any]) -> Any:
        from sgl_ragged.features.windows.allocator import HybridAllocator

        return HybridAllocator(found.size_full, found.size_swa, kvcache=kvcache, **settings)

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.features.windows.pool import RaggedHybridPool

        pool = worker.pool
        return RaggedHybridPool(
            pool,
            settings,
            pool.layer_numbers,
            window_tokens=worker.sizes.swa_max_total_num_tokens,
            num_heads=pool.sizes.layout.num_heads,
            dtype=pool.dtype,
            device=pool.device,
        )

    def layer_backend(self, model_runner: Any, kernel: str) -> Any:
        from sgl_ragged.features.windows.attention import window_backend

        return window_backend(model_runner, kernel)

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"window_pages": sizes.side_pages, "windows_bytes": sizes.side_pages_bytes}


WINDOWS = Windows()

"""Retrieval, as a feature of the server."""

from __future__ import annotations

from sgl_ragged.plugin.seams import BATCH, REGISTRY, RUN_BATCH, TREE, Feature, Seam

PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"

RETRIEVAL = Feature(
    planned=lambda plan: plan.retrieval is not None,
    asked=" with --ragged-reservoir",
    seams=(
        Seam(f"{BATCH}.prepare_for_extend", ("self",), "retrieval.sglang_hooks.begin_prefill"),
        Seam(*RUN_BATCH, "retrieval.sglang_hooks.name_requests"),
        Seam(f"{PAGED}._release_page_ids", ("self", "page_ids"), "retrieval.sglang_hooks.forget_pages"),
        Seam(f"{PAGED}.clear", ("self",), "retrieval.sglang_hooks.forget_all_pages"),
        Seam(f"{REGISTRY}.register_radix_cache_backend", ("name", "factory")),
        Seam(f"{REGISTRY}.create_unified_radix_cache", ("ctx", "cache_class")),
        Seam(f"{TREE}.swa_reprefill_tail_tokens", ("self", "req")),
        Seam(f"{TREE}.checkpoint", ("self", "req", "up_to", "kwargs")),
        Seam(f"{TREE}.on_release", ("self", "req", "checkpointed")),
    ),
    radix_cache=("ragged_retrieval", "retrieval.sglang_cache.retrieval_cache"),
)

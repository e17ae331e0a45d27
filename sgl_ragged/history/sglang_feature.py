"""Bounded histories, as a feature of the server."""

from __future__ import annotations

from sgl_ragged.plugin.seams import ADDER, BATCH, REGISTRY, TREE, Feature, Seam

CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"

HISTORY = Feature(
    planned=lambda plan: plan.history is not None,
    asked=" with --ragged-history",
    seams=(
        Seam(f"{BATCH}.check_decode_mem", ("self", "selected_indices"), "history.sglang_admission.make_room"),
        Seam(
            f"{ADDER}._get_running_request_total_token_offset",
            ("self", "req"),
            "history.sglang_admission.reserve_running",
        ),
        Seam(
            f"{ADDER}._check_prefill_budget",
            ("self", "req", "extend_input_len", "total_tokens", "swa_host_hit_length", "chunk_limit"),
            "history.sglang_admission.fits",
        ),
        Seam(
            f"{ADDER}._update_prefill_budget",
            (
                *("self", "prefix_len", "extend_input_len", "max_new_tokens", "retracted_stain", "mamba_gap_reserve"),
                *("request_slot_reserve", "is_chunked_continuation", "replay_len"),
            ),
            "history.sglang_admission.reserve_admitted",
        ),
        Seam(f"{CHECKER}._get_total_uncached_sizes", ("self",), "history.sglang_admission.uncached_tokens"),
        Seam(f"{CHECKER}._check_kv_page_invariants", ("self",), "history.sglang_admission.check_held_pages"),
        Seam(f"{REGISTRY}.register_radix_cache_backend", ("name", "factory")),
        Seam(f"{REGISTRY}.create_unified_radix_cache", ("ctx", "cache_class")),
        Seam(f"{TREE}.checkpoint", ("self", "req", "up_to", "kwargs")),
        Seam(f"{TREE}.free_kv_row", ("self", "kv", "ranges")),
        Seam(f"{TREE}.on_release", ("self", "req", "checkpointed")),
        Seam(f"{TREE}.evict_sliding_windows", ("self", "req", "pre_len", "eviction_interval")),
        Seam(f"{TREE}.release_swa_prefix_lock", ("self", "req")),
    ),
    radix_cache=("ragged_bounded", "history.sglang_cache.bounded_cache"),
)

"""What the plugin needs of SGLang: each function's dotted path and parameters, by the part of a server that needs it.

Data alone, which imports nothing. `contract_checks` compares it with the installed SGLang, and `serve.hooks` and the
features wrap some of these functions. The others are called, or are methods that classes of ours override: SGLang has a
default for each, so an override under another name would never be called. `sglang_digests.json` has digests of their
sources in the last of RELEASES.
"""

from __future__ import annotations

RELEASES = ("0.5.23",)
"""Releases of SGLang that real servers are tested with; pyproject.toml asks for the first of them or later ones.

Equal parameters do not prove that a server works, so a start on another release compares sources, too, and warns. Up to
0.5.22 SGLang asks no allocator how much a prefill needs, and counts a page more for each request: open segments would
not be paid for by use. These releases lack functions of this file.
"""

REMEDY = f"install sglang=={RELEASES[-1]}, or a release of sgl-ragged made for this one"

Functions = dict[str, tuple[str, ...] | None]
"""Parameters of functions, `self` included, by dotted path; None where the source alone is compared."""

_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
_BUDGETS = "sglang.srt.mem_cache.prefill_budget"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_PD = "sglang.srt.disaggregation"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache"
_HOST_STACK = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.StackStrategy"
_PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"
_DEVICE = "sglang.srt.platforms.device_mixin.DeviceMixin"
_TORCH_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
BATCH = f"{SCHEDULE_BATCH}.ScheduleBatch"
CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
REGISTRY = "sglang.srt.mem_cache.registry"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
SWA_ALLOCATOR = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
PAGED_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
PREALLOC_QUEUE = f"{_PD}.decode.DecodePreallocQueue"
HOST_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

PROFILE_BYTES = f"{CONFIGURATOR}._profile_available_bytes"
DEAD_WORKER = "sglang.srt.entrypoints.engine._scheduler_died_error"
RESOLUTION_HOOK = "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook"
RUN_BATCH = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
ADAPTER_ID = "sglang.srt.lora.lora_registry.LoRARef.deterministic_id"
STATS = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats"
CONTROLLER_READY = "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info"
LOAD_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"
CPU_HEADS = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
FUSED_KV_WRITE = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
FLUSH_AFTER_UPDATE = f"{_WEIGHTS}.flush_cache_after_weight_update"
END_UPDATE = f"{_WEIGHTS}.end_weight_update"
WINDOW_BUFFER = "sglang.srt.layers.attention.triton_backend.update_sliding_window_buffer"
NGRAM_CORPUS = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"
ALLOC_FOR_DRAFTS = "sglang.srt.mem_cache.allocation.alloc_for_spec_decode"
BEFORE_VERIFY = "sglang.srt.speculative.spec_utils.record_stream_for_v2_verify"
SAMPLE_DRAFTS = "sglang.srt.speculative.eagle_utils.eagle_sample"
PD_MEMORY = f"{_PD}.utils.setup_state_kv_args"
PD_SENDER = f"{_PD}.prefill.PrefillBootstrapQueue.create_sender"
PD_PEER = f"{_PD}.nixl.conn.NixlKVManager._add_remote_peer"


def _sources(owner: str, *names: str) -> Functions:
    """Methods or functions of which the source alone is compared."""
    return dict.fromkeys(f"{owner}.{name}" for name in names)


def _budget(name: str) -> Functions:
    """Methods of an SGLang prefill budget that `serve.prefill_budget` overrides."""
    return {
        f"{_BUDGETS}.{name}.available_chunk_tokens": ("self", "chunk_limit"),
        f"{_BUDGETS}.{name}.fit_chunk": ("self", "extend_input_len", "max_new_tokens", "chunk_limit"),
        f"{_BUDGETS}.{name}.check_prefill": (
            *("self", "extend_input_len", "total_tokens", "max_new_tokens", "input_tokens", "swa_host_hit_length"),
            *("chunk_limit", "auxiliary_swa_host_hit_length"),
        ),
        f"{_BUDGETS}.{name}.can_allocate_prefill": (
            *("self", "paged_input", "extend_input_len", "max_new_tokens", "chunk_limit"),
        ),
        f"{_BUDGETS}.{name}.reserve": (
            *("self", "extend_input_len", "max_new_tokens", "extra_tokens", "chunk_limit", "is_chunked_continuation"),
        ),
    }


KV_BYTES: Functions = {PROFILE_BYTES: ("self", "pre_model_load_memory")}
"""For --kv-bytes with either pool."""

SERVING: Functions = {
    **KV_BYTES,
    DEAD_WORKER: ("rank", "proc"),
    RESOLUTION_HOOK: ("name",),
    f"{CONFIGURATOR}._resolve_memory_pool_config": ("self", "pre_model_load_memory"),
    f"{CONFIGURATOR}._build_token_to_kv_pool": (
        *("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
    ),
    f"{CONFIGURATOR}._build_token_to_kv_pool_allocator": (
        *("self", "sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool"),
        "token_to_kv_pool_allocator",
    ),
    f"{SCHEDULE_BATCH}.alloc_for_extend": ("batch",),
    f"{SCHEDULE_BATCH}.alloc_for_decode": ("batch", "token_per_req"),
    f"{REGISTRY}.create_unified_radix_cache": ("ctx", "cache_class"),
    f"{TREE}.match_prefix": ("self", "params"),
    f"{TREE}.prefix_device_indices": ("self", "req"),
    f"{TREE}.checkpoint": ("self", "req", "up_to", "kwargs"),
    f"{TREE}.free_kv_row": ("self", "kv", "ranges"),
    f"{TREE}.evict": ("self", "params"),
    f"{TREE}.evict_for_alloc": ("self", "params", "allocation_reclaim_satisfied"),
    f"{TREE}.evictable_size": ("self",),
    f"{TREE}.full_evictable_size": ("self",),
    f"{TREE}.protected_size": ("self",),
    f"{TREE}.full_protected_size": ("self",),
    f"{TREE}.on_release": ("self", "req", "checkpointed"),
    f"{TREE}.reset": ("self",),
    f"{PAGED_ALLOCATOR}._release_page_ids": ("self", "page_ids"),
    f"{PAGED_ALLOCATOR}.clear": ("self",),
    f"{_ALLOCATOR}.request_slot_reserve": ("self", "has_req_pool_slot", "prefill_tokens"),
    f"{_ALLOCATOR}.max_new_tokens_for_memory": (
        *("self", "input_tokens", "max_new_tokens", "token_capacity", "sliding_window_size", "chunk_size"),
    ),
    f"{_ALLOCATOR}.get_extend_allocation_demand": (
        *("self", "prefix_lens_cpu", "seq_lens_cpu", "conservative_num_tokens", "shard_size"),
    ),
    f"{_ALLOCATOR}.check_decode_capacity": ("self", "num_tokens", "tree_cache", "requests", "spec_algorithm"),
    f"{_ALLOCATOR}.create_prefill_budget": ("self", "tree_cache", "num_mixed_decode_tokens"),
    **_budget("PrefillBudget"),
    f"{ADDER}.add_chunked_req": ("self", "req"),
    LOAD_WEIGHTS: ("model", "weights", "target_device"),
    CPU_HEADS: ("model_config", "load_config", "tp_size"),
    FUSED_KV_WRITE: ("forward_batch",),
    f"{SCHEDULER}.get_init_info": ("self",),
    f"{SCHEDULER}.get_internal_state": ("self", "recv_req"),
    STATS: ("self", "stats"),
    FLUSH_AFTER_UPDATE: ("self", "recv_req", "success", "message"),
    END_UPDATE: ("self", "recv_req"),
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BACKEND}.init_cuda_graph_state": ("self", "max_bs", "max_num_tokens"),
    f"{_BACKEND}.get_cuda_graph_seq_len_fill_value": ("self",),
    f"{_BACKEND}.shared_read_ends": ("self", "fm"),
    # Overridden, or called by way of `super`.
    **_sources(_BACKEND, "init_forward_metadata_in_graph", "forward_extend", "forward_decode"),
    **_sources(POOL, "__init__", "_create_buffers", "_clear_buffers", "get_kv_size_bytes", "move_kv_cache"),
    **_sources(PAGED_ALLOCATOR, "__init__", "available_size", "clear", "alloc", "alloc_extend", "alloc_decode"),
    **_sources(TREE, "__init__", "init_load_back", "load_back_is_cache_owned"),
    **_sources(_BUDGETS, "PrefillBudget.__init__"),
    **_sources(_PLATFORM, "get_default_attention_backend", "get_dispatch_key_name", "init_backend"),
    **_sources(_PLATFORM, "get_speculative_cache_locs_fn", "get_speculative_worker_cls"),
    **_sources(_PLATFORM, "supports_speculative_algorithm"),
    **_sources("sglang.srt.platforms.cpu.CpuDeviceMixin", "get_device"),
    **_sources(_DEVICE, "get_torch_profiler_activity", "get_torch_profiler_activity_str"),
    # They decide when the functions above are called.
    **_sources("sglang.srt.plugins.hook_registry.HookRegistry", "register", "apply_hooks"),
    **_sources("sglang.srt.server_args.ServerArgs", "add_cli_args", "from_cli_args", "resolve_once"),
    **_sources("sglang.srt.runtime_context", "publish"),
    **_sources(SCHEDULER, "get_new_batch_prefill", "update_running_batch"),
    **_sources(BATCH, "prepare_for_extend", "prepare_for_decode", "retract_decode"),
    **_sources(ADDER, "add_one_req"),
}
"""For every server with --kv-pool ragged."""

START_CHECK: Functions = {
    "sglang.srt.entrypoints.warmup.warmup": ("name",),
    "sglang.srt.entrypoints.http_server.get_global_state": (),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request": ("self", "obj", "request"),
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache": ("self", "timeout_s"),
}
"""For the process with the HTTP server, where answers are checked at the start."""

CONTROLLER: Functions = {CONTROLLER_READY: ("self",)}
"""For the process that starts the replicas of --dp-size."""

_OWN_TREE: Functions = {
    f"{REGISTRY}.register_radix_cache_backend": ("name", "factory"),
    f"{REGISTRY}.create_unified_radix_cache": ("ctx", "cache_class"),
    f"{TREE}.checkpoint": ("self", "req", "up_to", "kwargs"),
    f"{TREE}.on_release": ("self", "req", "checkpointed"),
}
"""For features with a radix cache of their own."""

_BEFORE_BATCH: Functions = {
    RUN_BATCH: (
        *("self", "batch", "forward_batch", "pp_proxy_tensors", "is_verify", "skip_attn_backend_init"),
        *("capture_hidden_mode", "return_kv_loc_plan"),
    )
}

WINDOWS: Functions = {
    f"{SWA_POOL}.__init__": (
        *("self", "size", "size_swa", "page_size", "dtype", "head_num", "head_dim", "swa_attention_layer_ids"),
        *("full_attention_layer_ids", "device", "token_to_kv_pool_class", "full_kv_pool_class"),
        *("swa_kv_pool_class", "full_kv_pool_kwargs", "swa_kv_pool_kwargs", "enable_memory_saver", "kwargs"),
    ),
    **_budget("SWAPrefillBudget"),
    f"{SWA_POOL}.translate_loc_from_full_to_swa": ("self", "kv_indices"),
    f"{SWA_POOL}.set_kv_buffer": ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    WINDOW_BUFFER: (
        *("window_kv_indptr", "translator", "plan", "req_pool_indices", "sliding_window_size", "seq_lens"),
        *("bs", "device", "token_to_kv_pool", "window_kv_indices"),
    ),
    **_sources(SWA_ALLOCATOR, "__init__", "alloc_extend", "create_prefill_budget"),
}

HISTORY: Functions = {
    f"{BATCH}.check_decode_mem": ("self", "selected_indices"),
    f"{ADDER}._get_running_request_total_token_offset": ("self", "req"),
    f"{ADDER}._check_prefill_budget": (
        *("self", "req", "extend_input_len", "total_tokens", "swa_host_hit_length", "chunk_limit"),
    ),
    f"{ADDER}._update_prefill_budget": (
        *("self", "prefix_len", "extend_input_len", "max_new_tokens", "retracted_stain", "mamba_gap_reserve"),
        *("request_slot_reserve", "is_chunked_continuation", "replay_len"),
    ),
    f"{CHECKER}._check_kv_page_invariants": ("self",),
    **_OWN_TREE,
    f"{TREE}.free_kv_row": ("self", "kv", "ranges"),
    f"{TREE}.evict_sliding_windows": ("self", "req", "pre_len", "eviction_interval"),
    f"{TREE}.release_swa_prefix_lock": ("self", "req"),
}

RETRIEVAL: Functions = {
    f"{BATCH}.prepare_for_extend": ("self",),
    **_BEFORE_BATCH,
    **_OWN_TREE,
    f"{TREE}.swa_reprefill_tail_tokens": ("self", "req"),
}

DRAFTS: Functions = {
    NGRAM_CORPUS: ("self", "req_ids", "batch_tokens", "total_lens"),
    ALLOC_FOR_DRAFTS: (
        *("tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "cur_kv_lens", "cur_kv_lens_cpu"),
        *("nxt_kv_lens", "nxt_kv_lens_cpu", "num_needed_tokens", "batch"),
    ),
    BEFORE_VERIFY: ("batch", "verify_input", "fwd_stream"),
    SAMPLE_DRAFTS: (
        *("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k"),
        *("watermark_state", "watermark_full_mask"),
    ),
    f"{DRAFT_BACKENDS}.create_decode_backend": ("self",),
    f"{DRAFT_BACKENDS}.create_draft_extend_backend": ("self",),
    "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache": (
        *("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
    ),
    **_sources(_TORCH_ATTENTION, "__init__", "_run_sdpa_forward_decode", "forward_extend"),
    **_sources(POOL, "_init_kv_copy_and_warmup"),
}

HOST_TIER: Functions = {
    ADAPTER_ID: ("lora_name", "lora_path"),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.register_stack_strategy": ("strategy",),
    f"{HOST_CONTROLLER}.start_writing": ("self",),
    f"{HOST_CONTROLLER}.start_loading": ("self",),
    f"{HOST_CONTROLLER}._generic_page_get": ("self", "operation", "hash_values", "host_indices", "extra_info"),
    f"{_HOST_POOL}.__init__": (
        *("self", "dtype", "device_capacity_tokens", "size_per_token", "start_layer", "end_layer"),
        *("host_to_device_ratio", "host_size", "page_size", "layout", "pin_memory", "device", "allocator_type"),
        *("dcp_size", "dcp_rank", "pool_label", "is_dummy", "host_token_capacity"),
    ),
    f"{_HOST_POOL}._allocate_host_buffer": ("self",),
    **_sources(HOST_CONTROLLER, "__init__", "load", "_storage_hit_query", "attach_storage_backend"),
    **_sources(_HOST_POOL, "backup_from_device_all_layer", "load_to_device_per_layer", "init_kv_buffer"),
    **_sources(_HOST_POOL, "get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"),
    **_sources(_HOST_POOL, "get_size_per_token"),
    **_sources(_HOST_STACK, "matches", "build"),
    **_BEFORE_BATCH,
}

DISAGGREGATION: Functions = {
    PD_MEMORY: ("kv_args", "token_to_kv_pool", "draft_token_to_kv_pool", "total_kv_layers", "req_to_token_pool"),
    PD_SENDER: ("self", "req", "num_kv_heads"),
    PD_PEER: ("self", "decode_kv_args"),
    f"{_PD}.common.conn.CommonKVSender.init": ("self", "num_kv_indices", "aux_index"),
    f"{_PD}.common.conn.CommonKVSender.send": (
        *("self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event"),
    ),
    f"{PREALLOC_QUEUE}._pre_alloc": ("self", "req", "prefix_indices", "prefix_len", "total_prefix_len"),
    f"{PREALLOC_QUEUE}._required_alloc_tokens": ("self", "fill_len", "prefix_len"),
    f"{PREALLOC_QUEUE}._prealloc_required_tokens": ("self", "req"),
    f"{PREALLOC_QUEUE}._pre_alloc_fill_len": ("req",),
    f"{PREALLOC_QUEUE}._check_if_req_exceed_kv_capacity": ("self", "req"),
    f"{PREALLOC_QUEUE}._transfer_page_indices": ("self", "decode_req", "kv_indices", "page_size"),
    f"{PREALLOC_QUEUE}._ensure_prefill_info": ("self", "addr_to_reqs"),
}

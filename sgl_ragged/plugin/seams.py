"""The seams inside SGLang's worker: which functions are wrapped, what they must look like, how they are installed.

SGLang logs hook errors and goes on. Here it is an error if a seam has other parameters than listed, or was not wrapped.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.options import RaggedOptions

BACKEND = "ragged"
"""Name of the attention backend in SGLang's registry."""

BOUNDED_CACHE = "ragged_bounded"
"""Name of the radix cache for bounded histories in SGLang's registry."""

RETRIEVAL_CACHE = "ragged_retrieval"
"""Name of the radix cache of servers that retrieve."""

SERVED = ("0.5.22", "0.5.23")
"""The releases of SGLang that real servers are tested with; pyproject.toml asks for these and their post releases.

Others are refused: that all seams are there does not mean that a server starts. 0.5.20 and 0.5.21 have them, and ask
platform plugins for pool and allocator classes, which from 0.5.22 on may stay SGLang's own.
"""

REMEDY = f"install sglang=={SERVED[-1]}, or a release of sgl-ragged made for this one"


@dataclass(frozen=True)
class Seam:
    """A function of SGLang: its dotted path, its parameters, and the name in `worker` of the hook that wraps it.

    Without a hook it is one that the launcher uses (`resolution`), or a method that our attention backend overrides.
    SGLang has a default for each of these, so one that it calls by another name would not be missed: decode would go on
    with the description of an earlier batch.
    """

    target: str
    parameters: tuple[str, ...]
    hook: str | None = None


_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

KV_BYTES_SEAMS = (Seam(f"{_CONFIGURATOR}._profile_available_bytes", ("self", "pre_model_load_memory"), "kv_bytes"),)

DEAD_WORKER = Seam("sglang.srt.entrypoints.engine._scheduler_died_error", ("rank", "proc"))

RAGGED_SEAMS = (
    *KV_BYTES_SEAMS,
    DEAD_WORKER,
    Seam("sglang.srt.arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    Seam(f"{_CONFIGURATOR}._resolve_memory_pool_config", ("self", "pre_model_load_memory"), "size_pool"),
    Seam(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        "build_pool",
    ),
    Seam(
        "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only",
        ("model", "weights", "target_device"),
        "place_weights",
    ),
    Seam(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        ("model_config", "load_config", "tp_size"),
        "repeat_heads_on_cpus",
    ),
    Seam("sglang.srt.models.utils.enable_fused_set_kv_buffer", ("forward_batch",), "no_fused_kv_write"),
    Seam("sglang.srt.managers.scheduler.Scheduler.get_init_info", ("self",), "scheduler_ready"),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        ("self", "stats"),
        "log_stats",
    ),
    Seam("sglang.srt.managers.scheduler.Scheduler.flush_cache", ("self", "empty_cache"), "flush_cache"),
    Seam(f"{_ADDER}.add_one_req_ignore_eos", ("self", "req"), "cut_one_request"),
    Seam(f"{_BACKEND}.init_forward_metadata", ("self", "forward_batch")),
    Seam(f"{_BACKEND}.init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
    Seam(f"{_BACKEND}.init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
    Seam(f"{_BACKEND}.get_cuda_graph_seq_len_fill_value", ("self",)),
    Seam(f"{_BACKEND}.shared_read_ends", ("self", "fm")),
)

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache"

ADAPTER_ID = Seam("sglang.srt.lora.lora_registry.LoRARef.deterministic_id", ("lora_name", "lora_path"))
CONTROLLER_SEAMS = (
    Seam(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        ("self",),
        "controller_ready",
    ),
)
"""What the process needs that starts the replicas of --dp-size. 0.5.22 lacks it: there nothing can be added to what
that process says, and /server_info has no word of the pool."""

_RUN_BATCH = (
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    (
        *("self", "batch", "forward_batch", "pp_proxy_tensors", "is_verify", "skip_attn_backend_init"),
        *("capture_hidden_mode", "return_kv_loc_plan"),
    ),
)

TIER_SEAMS = (
    ADAPTER_ID,
    Seam("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.register_stack_strategy", ("strategy",)),
    Seam(f"{_CONTROLLER}.start_writing", ("self",)),
    Seam(f"{_CONTROLLER}.start_loading", ("self",)),
    Seam(f"{_CONTROLLER}._generic_page_get", ("self", "operation", "hash_values", "host_indices", "extra_info")),
    Seam(
        f"{_HOST_POOL}.__init__",
        (
            *("self", "dtype", "device_capacity_tokens", "size_per_token", "start_layer", "end_layer"),
            *("host_to_device_ratio", "host_size", "page_size", "layout", "pin_memory", "device", "allocator_type"),
            *("dcp_size", "dcp_rank", "pool_label", "is_dummy", "host_token_capacity"),
        ),
    ),
    Seam(f"{_HOST_POOL}._allocate_host_buffer", ("self",)),
    Seam(*_RUN_BATCH, "recompute_segments"),
)
"""What a host tier needs beside the rest; 0.5.22 lacks some of it."""

_WINDOW_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"

WINDOW_SEAMS = (
    Seam(
        f"{_WINDOW_POOL}.__init__",
        (
            *("self", "size", "size_swa", "page_size", "dtype", "head_num", "head_dim", "swa_attention_layer_ids"),
            *("full_attention_layer_ids", "device", "token_to_kv_pool_class", "full_kv_pool_class"),
            *("swa_kv_pool_class", "full_kv_pool_kwargs", "swa_kv_pool_kwargs", "enable_memory_saver", "kwargs"),
        ),
    ),
    Seam(f"{_WINDOW_POOL}.translate_loc_from_full_to_swa", ("self", "kv_indices")),
    Seam(f"{_WINDOW_POOL}.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
    Seam(
        "sglang.srt.layers.attention.triton_backend.update_sliding_window_buffer",
        (
            *("window_kv_indptr", "translator", "plan", "req_pool_indices", "sliding_window_size", "seq_lens", "bs"),
            *("device", "token_to_kv_pool", "window_kv_indices"),
        ),
    ),
)
"""What models with sliding windows need beside the rest."""


_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

HISTORY_SEAMS = (
    Seam(f"{_BATCH}.check_decode_mem", ("self", "selected_indices"), "make_room"),
    Seam(f"{_ADDER}._get_running_request_total_token_offset", ("self", "req"), "reserve_running"),
    Seam(
        f"{_ADDER}._check_prefill_budget",
        ("self", "req", "extend_input_len", "total_tokens", "swa_host_hit_length", "chunk_limit"),
        "fits",
    ),
    Seam(
        f"{_ADDER}._update_prefill_budget",
        (
            *("self", "prefix_len", "extend_input_len", "max_new_tokens", "retracted_stain", "mamba_gap_reserve"),
            *("request_slot_reserve", "is_chunked_continuation", "replay_len"),
        ),
        "reserve_admitted",
    ),
    Seam(f"{_CHECKER}._get_total_uncached_sizes", ("self",), "uncached_tokens"),
    Seam(f"{_CHECKER}._check_kv_page_invariants", ("self",), "check_held_pages"),
    Seam("sglang.srt.mem_cache.registry.register_radix_cache_backend", ("name", "factory")),
    Seam("sglang.srt.mem_cache.registry.create_unified_radix_cache", ("ctx", "cache_class")),
    Seam(f"{_TREE}.checkpoint", ("self", "req", "up_to", "kwargs")),
    Seam(f"{_TREE}.free_kv_row", ("self", "kv", "ranges")),
    Seam(f"{_TREE}.on_release", ("self", "req", "checkpointed")),
    Seam(f"{_TREE}.evict_sliding_windows", ("self", "req", "pre_len", "eviction_interval")),
    Seam(f"{_TREE}.release_swa_prefix_lock", ("self", "req")),
)
"""What bounded histories need beside the rest."""

_PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"

RETRIEVAL_SEAMS = (
    Seam(f"{_BATCH}.prepare_for_extend", ("self",), "begin_prefill"),
    Seam(*_RUN_BATCH, "name_requests"),
    Seam(f"{_PAGED}._release_page_ids", ("self", "page_ids"), "forget_pages"),
    Seam(f"{_PAGED}.clear", ("self",), "forget_all_pages"),
    Seam("sglang.srt.mem_cache.registry.register_radix_cache_backend", ("name", "factory")),
    Seam("sglang.srt.mem_cache.registry.create_unified_radix_cache", ("ctx", "cache_class")),
    Seam(f"{_TREE}.swa_reprefill_tail_tokens", ("self", "req")),
    Seam(f"{_TREE}.checkpoint", ("self", "req", "up_to", "kwargs")),
    Seam(f"{_TREE}.on_release", ("self", "req", "checkpointed")),
)
"""What retrieval needs beside the rest."""


def resolve(target: str) -> object | None:
    """The object at a dotted path, or None; the function itself where it is a class method."""
    try:
        found = pkgutil.resolve_name(target)
    except (AttributeError, ImportError, ValueError):
        return None
    # A bound method is a new object each time: comparing identities would always see a change.
    return getattr(found, "__func__", found)


def seams_for(options: RaggedOptions) -> tuple[Seam, ...]:
    """The seams that serving with these options needs."""
    if not options.ragged:
        return KV_BYTES_SEAMS
    if options.plan is None:
        return RAGGED_SEAMS
    plan = options.plan
    further = (
        (WINDOW_SEAMS, plan.geometry.windowed is not None),
        (TIER_SEAMS, plan.tier is not None),
        (HISTORY_SEAMS, plan.history is not None),
        (RETRIEVAL_SEAMS, plan.retrieval is not None),
    )
    return sum((seams for seams, needed in further if needed), RAGGED_SEAMS)


def installed_release() -> str:
    """Version of the installed SGLang; RaggedConfigError if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise RaggedConfigError(f"SGLang is not installed; {REMEDY}") from None


def is_served(release: str) -> bool:
    """Whether a version of SGLang is one of SERVED, or a post release of one; what comes before a release is not."""
    version = Version(release)
    return version.base_version in SERVED and not version.is_prerelease


def check_seams(seams: tuple[Seam, ...], asked: str = "") -> None:
    """Raise RaggedConfigError with what is wrong: the release, seams that are missing or take other parameters.

    asked: what they are needed for, if that is not all serving, such as " with --flag".
    """
    release = installed_release()
    wrong = [] if is_served(release) else [f"a server was tested with {' and '.join(SERVED)} alone"]
    for seam in seams:
        function = resolve(seam.target)
        if not callable(function):
            wrong.append(f"{seam.target} (missing)")
            continue
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != seam.parameters:
            wrong.append(f"{seam.target} (takes {', '.join(parameters)})")
    if wrong:
        raise RaggedConfigError(f"SGLang {release} is not supported{asked}: {'; '.join(wrong)}; {REMEDY}")


def install(options: RaggedOptions) -> None:
    """Wrap the seams in this worker process and register the attention backend; check that each was wrapped.

    Raises:
        RaggedConfigError: a seam has other parameters than listed, or was not wrapped.
    """
    from sgl_ragged.plugin import worker

    _wrap(seams_for(options), options)
    if options.ragged:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(BACKEND)(worker.bind(worker.create_backend, options))
    if options.plan is not None and options.plan.history is not None:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        from sgl_ragged.history.sglang_cache import bounded_cache

        register_radix_cache_backend(BOUNDED_CACHE, bounded_cache)
    if options.plan is not None and options.plan.retrieval is not None:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        from sgl_ragged.retrieval.sglang_cache import retrieval_cache

        register_radix_cache_backend(RETRIEVAL_CACHE, retrieval_cache)


def install_in_controller(options: RaggedOptions) -> None:
    """The same in the process that starts the replicas of --dp-size, which needs less."""
    if options.ragged and not installed_release().startswith(SERVED[0]):
        _wrap(CONTROLLER_SEAMS, options)


def _wrap(seams: tuple[Seam, ...], options: RaggedOptions) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from sgl_ragged.plugin import worker

    check_seams(seams)
    wrapped = [(seam.target, seam.hook, resolve(seam.target)) for seam in seams if seam.hook is not None]
    for target, name, _ in wrapped:
        hook: Callable = getattr(worker, name)
        HookRegistry.register(
            target,
            worker.bind(hook, options),
            HookType.AROUND,
            source=HookSource(plugin_name="sgl_ragged", dist_name="sgl-ragged"),
        )
    HookRegistry.apply_hooks()
    lost = [target for target, _, original in wrapped if resolve(target) is original]
    if lost:
        raise RaggedConfigError(f"hooks did not take effect: {', '.join(lost)}")

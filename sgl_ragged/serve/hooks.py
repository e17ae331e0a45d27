"""The seams inside SGLang's worker: which functions are wrapped, what they must look like, how they are installed.

SGLang logs hook errors and goes on. Here it is an error if a seam has other parameters than listed, or was not wrapped.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from packaging.version import Version

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import Seam, joined_features

if TYPE_CHECKING:
    from sgl_ragged.launch.options import RaggedOptions

BACKEND = "ragged"
"""Name of the attention backend in SGLang's registry."""

SERVED = ("0.5.23",)
"""The releases of SGLang that real servers are tested with; pyproject.toml asks for these and their post releases.

Others are refused: that all seams are there does not mean that a server starts. Up to 0.5.22 SGLang asks no allocator
how much a prefill needs, and counts a page more for each request: open segments would not be paid for by use.
"""

REMEDY = f"install sglang=={SERVED[-1]}, or a release of sgl-ragged made for this one"


_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
BATCH = f"{SCHEDULE_BATCH}.ScheduleBatch"
CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
TREE_CLASS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
REGISTRY = "sglang.srt.mem_cache.registry"
RUN_BATCH = (
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    (
        *("self", "batch", "forward_batch", "pp_proxy_tensors", "is_verify", "skip_attn_backend_init"),
        *("capture_hidden_mode", "return_kv_loc_plan"),
    ),
)


def budget_seams(budget: str) -> tuple[Seam, ...]:
    """Return seams for the methods of an SGLang budget that `serve.prefill_budget` overrides."""
    return tuple(
        Seam(f"sglang.srt.mem_cache.prefill_budget.{budget}.{name}", ("self", *parameters))
        for name, parameters in (
            ("available_chunk_tokens", ("chunk_limit",)),
            ("fit_chunk", ("extend_input_len", "max_new_tokens", "chunk_limit")),
            (
                "check_prefill",
                (
                    *("extend_input_len", "total_tokens", "max_new_tokens", "input_tokens", "swa_host_hit_length"),
                    *("chunk_limit", "auxiliary_swa_host_hit_length"),
                ),
            ),
            ("can_allocate_prefill", ("paged_input", "extend_input_len", "max_new_tokens", "chunk_limit")),
            (
                "reserve",
                ("extend_input_len", "max_new_tokens", "extra_tokens", "chunk_limit", "is_chunked_continuation"),
            ),
        )
    )


KV_BYTES_SEAMS = (
    Seam(
        f"{_CONFIGURATOR}._profile_available_bytes",
        ("self", "pre_model_load_memory"),
        "sgl_ragged.serve.worker.kv_bytes",
    ),
)

DEAD_WORKER = Seam("sglang.srt.entrypoints.engine._scheduler_died_error", ("rank", "proc"))

RAGGED_SEAMS = (
    *KV_BYTES_SEAMS,
    DEAD_WORKER,
    Seam("sglang.srt.arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    Seam(
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        ("self", "pre_model_load_memory"),
        "sgl_ragged.serve.worker.size_pool",
    ),
    Seam(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        "sgl_ragged.serve.worker.build_pool",
    ),
    Seam(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        (
            *("self", "sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool"),
            "token_to_kv_pool_allocator",
        ),
        "sgl_ragged.serve.allocator.build_allocator",
    ),
    Seam(f"{SCHEDULE_BATCH}.alloc_for_extend", ("batch",), "sgl_ragged.serve.allocator.alloc_for_extend"),
    Seam(
        f"{SCHEDULE_BATCH}.alloc_for_decode",
        ("batch", "token_per_req"),
        "sgl_ragged.serve.allocator.alloc_for_decode",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
        ("self", "indices"),
        "sgl_ragged.serve.allocator.free_rows",
    ),
    Seam(f"{CHECKER}._get_total_uncached_sizes", ("self",), "sgl_ragged.serve.allocator.uncached_tokens"),
    Seam(
        f"{REGISTRY}.create_unified_radix_cache",
        ("ctx", "cache_class"),
        "sgl_ragged.serve.radix_cache.keep_open_segments",
    ),
    *(
        Seam(f"{TREE_CLASS}.{name}", parameters)
        for name, parameters in (
            ("match_prefix", ("self", "params")),
            ("prefix_device_indices", ("self", "req")),
            ("checkpoint", ("self", "req", "up_to", "kwargs")),
            ("free_kv_row", ("self", "kv", "ranges")),
            ("evict", ("self", "params")),
            ("evict_for_alloc", ("self", "params", "allocation_reclaim_satisfied")),
            ("evictable_size", ("self",)),
            ("full_evictable_size", ("self",)),
            ("reset", ("self",)),
        )
    ),
    *(
        Seam(f"{_ALLOCATOR}.{name}", parameters)
        for name, parameters in (
            ("request_slot_reserve", ("self", "has_req_pool_slot", "prefill_tokens")),
            (
                "max_new_tokens_for_memory",
                ("self", "input_tokens", "max_new_tokens", "token_capacity", "sliding_window_size", "chunk_size"),
            ),
            (
                "get_extend_allocation_demand",
                ("self", "prefix_lens_cpu", "seq_lens_cpu", "conservative_num_tokens", "shard_size"),
            ),
            ("check_decode_capacity", ("self", "num_tokens", "tree_cache", "requests", "spec_algorithm")),
        )
    ),
    Seam(f"{_ALLOCATOR}.create_prefill_budget", ("self", "tree_cache", "num_mixed_decode_tokens")),
    *budget_seams("PrefillBudget"),
    Seam(f"{ADDER}.add_chunked_req", ("self", "req")),
    Seam(
        "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only",
        ("model", "weights", "target_device"),
        "sgl_ragged.serve.worker.place_weights",
    ),
    Seam(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        ("model_config", "load_config", "tp_size"),
        "sgl_ragged.serve.worker.repeat_heads_on_cpus",
    ),
    Seam(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        ("forward_batch",),
        "sgl_ragged.serve.worker.no_fused_kv_write",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info", ("self",), "sgl_ragged.serve.metrics.scheduler_ready"
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        ("self", "stats"),
        "sgl_ragged.serve.metrics.log_stats",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        ("self", "empty_cache"),
        "sgl_ragged.serve.metrics.flush_cache",
    ),
    Seam(
        f"{_WEIGHTS}.flush_cache_after_weight_update",
        ("self", "recv_req", "success", "message"),
        "sgl_ragged.serve.weight_updates.weights_changed",
    ),
    Seam(
        f"{_WEIGHTS}.end_weight_update",
        ("self", "recv_req"),
        "sgl_ragged.serve.weight_updates.update_session_ended",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        ("self", "recv_req"),
        "sgl_ragged.serve.weight_updates.internal_state",
    ),
    Seam(f"{ADDER}.add_one_req_ignore_eos", ("self", "req"), "sgl_ragged.serve.chunking.cut_one_request"),
    Seam(f"{_BACKEND}.init_forward_metadata", ("self", "forward_batch")),
    Seam(f"{_BACKEND}.init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
    Seam(f"{_BACKEND}.init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
    Seam(f"{_BACKEND}.get_cuda_graph_seq_len_fill_value", ("self",)),
    Seam(f"{_BACKEND}.shared_read_ends", ("self", "fm")),
)


ADAPTER_ID = Seam("sglang.srt.lora.lora_registry.LoRARef.deterministic_id", ("lora_name", "lora_path"))
CONTROLLER_SEAMS = (
    Seam(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        ("self",),
        "sgl_ragged.serve.metrics.controller_ready",
    ),
)
"""What the process needs that starts the replicas of --dp-size."""


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
    return sum((feature.seams for feature, _ in joined_features(options.plan)), RAGGED_SEAMS)


def installed_release() -> str:
    """Version of the installed SGLang; RaggedConfigError if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise RaggedConfigError(f"SGLang is not installed; {REMEDY}") from None


def is_served(release: str) -> bool:
    """True for a version of SGLang in SERVED, or a post release of one; what comes before a release is not."""
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
    from sgl_ragged.serve.refusal import bind
    from sgl_ragged.serve.worker import create_backend

    _wrap(seams_for(options), options)
    if options.ragged:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(BACKEND)(bind(create_backend, options))
    for feature, _ in [] if options.plan is None else joined_features(options.plan):
        if feature.radix_cache is not None:
            from sglang.srt.mem_cache.registry import register_radix_cache_backend

            name, factory = feature.radix_cache
            register_radix_cache_backend(name, resolve(factory))


def install_in_controller(options: RaggedOptions) -> None:
    """The same in the process that starts the replicas of --dp-size, which needs less."""
    if options.ragged:
        _wrap(CONTROLLER_SEAMS, options)


def _wrap(seams: tuple[Seam, ...], options: RaggedOptions) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from sgl_ragged.serve.refusal import bind

    check_seams(seams)
    wrapped = [(seam.target, seam.hook, resolve(seam.target)) for seam in seams if seam.hook is not None]
    for target, name, _ in wrapped:
        hook: Callable = pkgutil.resolve_name(name)
        HookRegistry.register(
            target,
            bind(hook, options),
            HookType.AROUND,
            source=HookSource(plugin_name="sgl_ragged", dist_name="sgl-ragged"),
        )
    HookRegistry.apply_hooks()
    lost = [target for target, _, original in wrapped if resolve(target) is original]
    if lost:
        raise RaggedConfigError(f"hooks did not take effect: {', '.join(lost)}")


def hook_launcher(seam: Seam, hook: Callable) -> None:
    """Wrap a function that the launcher calls. Raises RaggedConfigError where that takes no effect."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    before = resolve(seam.target)
    source = HookSource(plugin_name="sgl_ragged", dist_name="sgl-ragged")
    HookRegistry.register(seam.target, hook, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
    if resolve(seam.target) is before:
        raise RaggedConfigError(f"hooks did not take effect: {seam.target}")

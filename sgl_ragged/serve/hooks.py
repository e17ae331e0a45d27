"""The functions of SGLang that every worker wraps, and how they are installed with those of features."""

from __future__ import annotations

import functools
from collections.abc import Callable

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.contract_checks import check_contract, replace_class, wrap
from sgl_ragged.launch.plan import BACKEND, WorkerSettings
from sgl_ragged.serve import allocation_hooks, metrics, radix_cache, weight_updates, worker
from sgl_ragged.serve.feature import Hook, joined_features
from sgl_ragged.serve.refusal import ending_worker

KV_BYTES_HOOKS = (Hook(sglang.PROFILE_BYTES, worker.kv_bytes, bound=True),)
"""Hooks of a worker with SGLang's own pool and --kv-bytes."""

HOOKS = (
    Hook(f"{sglang.SCHEDULE_BATCH}.alloc_for_extend", allocation_hooks.alloc_for_extend),
    Hook(f"{sglang.SCHEDULE_BATCH}.alloc_for_decode", allocation_hooks.alloc_for_decode),
    Hook(f"{sglang.REGISTRY}.create_unified_radix_cache", radix_cache.keep_open_segments),
    Hook(sglang.FUSED_KV_WRITE, worker.no_fused_kv_write),
    Hook(f"{sglang.SCHEDULER}.get_init_info", metrics.scheduler_ready, bound=True),
    Hook(sglang.STATS, metrics.log_stats),
    Hook(sglang.FLUSH_AFTER_UPDATE, weight_updates.weights_changed),
    Hook(sglang.END_UPDATE, weight_updates.update_session_ended),
    Hook(f"{sglang.SCHEDULER}.get_internal_state", weight_updates.internal_state),
)
"""Hooks of every worker with --kv-pool ragged."""

RANKS_HOOKS = (
    Hook(sglang.LOAD_WEIGHTS, worker.place_weights, bound=True),
    Hook(sglang.CPU_HEADS, worker.repeat_heads_on_cpus, bound=True),
)
"""Hooks of workers that are one of several tensor-parallel ranks."""

CONTROLLER_HOOKS = (Hook(sglang.CONTROLLER_READY, metrics.controller_ready),)


def install(serving: WorkerSettings) -> None:
    """Wrap SGLang's functions in this worker process and register the attention backend and radix caches.

    Raises:
        RaggedConfigError: a function has other parameters than the contract lists, or was not wrapped.
    """
    if serving.plan is None:
        check_contract(sglang.KV_BYTES)
        _wrap(KV_BYTES_HOOKS, serving)
        return
    features = [feature for feature, _ in joined_features(serving.plan)]
    check_contract(sglang.SERVING)
    replace_class(sglang.CONFIGURATOR, worker.configurator_class(serving))
    of_ranks = RANKS_HOOKS if serving.plan.ranks > 1 else ()
    _wrap((*HOOKS, *of_ranks, *(hook for feature in features for hook in feature.hooks)), serving)

    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_attention_backend(BACKEND)(_bound(Hook("", worker.create_backend, bound=True), serving))
    for feature in features:
        if feature.radix_cache is not None:
            register_radix_cache_backend(*feature.radix_cache)


def install_in_controller(serving: WorkerSettings) -> None:
    """Wrap what the process needs that starts the replicas of --dp-size."""
    if serving.plan is not None:
        check_contract(sglang.CONTROLLER)
        _wrap(CONTROLLER_HOOKS, serving)


def _wrap(hooks: tuple[Hook, ...], serving: WorkerSettings) -> None:
    wrap([(hook.target, _bound(hook, serving)) for hook in hooks])


def _bound(hook: Hook, serving: WorkerSettings) -> Callable:
    function = hook.function
    if hook.bound:
        function = functools.wraps(function)(functools.partial(function, serving))
    return ending_worker(function, serving.from_command_line)

"""The hooks that run in a worker: sizing, the pool, the attention backend. Installed by `seams`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sgl_ragged.mem_pool.sizing import PoolPlan, plan_pool
from sgl_ragged.plugin.metrics import log_stats as log_stats
from sgl_ragged.plugin.metrics import scheduler_ready as scheduler_ready
from sgl_ragged.plugin.model_layout import model_budgets, model_geometry, model_statistics, rank_heads, rank_layout
from sgl_ragged.plugin.options import RaggedOptions

logger = logging.getLogger(__name__)


def bind(hook: Callable, options: RaggedOptions) -> Callable:
    """The hook as SGLang calls it: the original function first."""
    return functools.partial(hook, options)


def kv_bytes(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> int:
    """--kv-bytes in place of profiling free memory, for either pool."""
    return options.kv_bytes if options.kv_bytes is not None else original(configurator, pre_model_load_memory)


def size_pool(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> Any:
    """Slots and request rows from the KV budget, in place of tokens from bytes per token."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    budget = configurator._profile_available_bytes(pre_model_load_memory)
    layout = _layout(options, configurator)
    plan = plan_pool(
        layout,
        configurator.kv_cache_dtype.itemsize,
        budget,
        schedule.max_running_requests,
        _side_bytes(options, configurator, layout),
    )
    tokens = _least_over_ranks(plan.max_total_tokens)
    if schedule.max_total_tokens is not None:
        tokens = min(tokens, schedule.max_total_tokens // options.segment * options.segment)
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=_least_over_ranks(plan.max_requests),
        mem_fraction_static=schedule.mem_fraction_static,
    )


def build_pool(
    options: RaggedOptions, original: Callable, configurator: Any, *, sizes: Any, req_to_token_pool: Any, **_: Any
) -> Any:
    """The ragged pool in place of SGLang's, and the start-up line."""
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.mem_pool.pool import RaggedTokenToKVPool
    from sgl_ragged.scorers import get_scorer

    layout = _layout(options, configurator)
    plan = PoolPlan(
        layout=layout,
        itemsize=configurator.kv_cache_dtype.itemsize,
        num_slots=sizes.max_total_num_tokens // options.segment + 1,
        num_rows=req_to_token_pool.size + 1,
        side_bytes=_side_bytes(options, configurator, layout),
    )
    parallel, geometry = get_parallel(), model_geometry(configurator.model_config)
    heads = rank_heads(geometry.num_heads, parallel.attn_tp_rank, parallel.attn_tp_size)
    statistics = [
        {name: tensor[heads].to(configurator.device) for name, tensor in layer.items()}
        for layer in model_statistics(options, geometry)
    ]
    pool = RaggedTokenToKVPool(
        plan,
        get_scorer(options.scorer),
        statistics,
        q_per_kv=geometry.q_per_kv,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
    )
    logger.info("%s", model_budgets(options, geometry).source)
    logger.info("ragged KV pool (ratio %s, scorer %s): %s", options.ratio, options.scorer, plan.describe())
    return pool


def no_fused_kv_write(options: RaggedOptions, original: Callable, forward_batch: Any) -> bool:
    """Models must hand K and V to the backend: a kernel that writes them by token location would miss the slabs."""
    return False


def create_backend(options: RaggedOptions, model_runner: Any) -> Any:
    """SGLang's factory of the attention backend called `seams.BACKEND`."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.attention.backend import RaggedAttnBackend
    from sgl_ragged.attention.kernel_choice import choose_kernel, make_operations

    observer = options.observer and options.observer.for_rank(get_parallel().attn_tp_rank)
    kernel = choose_kernel(options.kernel, torch.device(model_runner.device).type)
    logger.info("ragged attention kernels: %s", kernel)
    return RaggedAttnBackend(model_runner, functools.partial(make_operations, kernel), observer)


def _layout(options: RaggedOptions, configurator: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return rank_layout(options, model_geometry(configurator.model_config), parallel.attn_tp_rank, parallel.attn_tp_size)


def _side_bytes(options: RaggedOptions, configurator: Any, layout: Any) -> int:
    """Bytes per request row that the scorer keeps beside the tail."""
    from sgl_ragged.mem_pool.slab_store import side_bytes
    from sgl_ragged.scorers import get_scorer

    geometry = model_geometry(configurator.model_config)
    return side_bytes(get_scorer(options.scorer), layout, geometry.q_per_kv, configurator.kv_cache_dtype)


def _least_over_ranks(value: int) -> int:
    """Smallest value over the tensor-parallel ranks: budgets differ between their heads, page numbers must not."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return value
    least = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=parallel.world_group.cpu_group)
    return int(least.item())

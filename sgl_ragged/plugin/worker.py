"""The hooks that run in a worker: sizing, the pool, the attention backend. Installed by `seams`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.weights import HeadOrder
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import PoolPlan, plan_pool
from sgl_ragged.plugin.metrics import log_stats as log_stats
from sgl_ragged.plugin.metrics import scheduler_ready as scheduler_ready
from sgl_ragged.plugin.model_layout import rank_layout, rank_statistics, served_budgets
from sgl_ragged.plugin.model_support import refuse_kv_dtype
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.plugin.placing import describe_placement
from sgl_ragged.plugin.refusal import end_worker
from sgl_ragged.plugin.served_budgets import require_equal_digests

logger = logging.getLogger(__name__)

NO_WEIGHT_UPDATES = (
    "weights cannot be updated at run time while heads are placed on other ranks than the checkpoint's order gives; "
    "restart with --ragged-fairkv none"
)
"""What SGLang answers to requests that would write weights in the checkpoint's order."""


def bind(hook: Callable, options: RaggedOptions) -> Callable:
    """The hook as SGLang calls it, the original function first; a refusal ends the worker with one line."""

    @functools.wraps(hook)
    def bound(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(options, *args, **kwargs)
        except RaggedConfigError as error:
            from sglang.srt.runtime_context import get_parallel

            end_worker(error, options, get_parallel().attn_tp_rank)

    return bound


def kv_bytes(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> int:
    """--kv-bytes in place of profiling free memory, for either pool."""
    return options.kv_bytes if options.kv_bytes is not None else original(configurator, pre_model_load_memory)


def size_pool(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> Any:
    """Slots and request rows from the KV budget, in place of tokens from bytes per token."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_parallel, get_schedule

    refuse_kv_dtype(configurator.kv_cache_dtype)
    schedule, parallel = get_schedule(), get_parallel()
    require_equal_digests(served_budgets(options).digest, parallel.attn_tp_size, parallel.world_group.cpu_group)
    budget = configurator._profile_available_bytes(pre_model_load_memory)
    layout = _layout(options)
    plan = plan_pool(
        layout,
        configurator.kv_cache_dtype.itemsize,
        budget,
        schedule.max_running_requests,
        _side_bytes(options, configurator, layout),
        schedule.max_total_tokens,
    )
    return MemoryPoolConfig(
        max_total_num_tokens=_least_over_ranks(plan.max_total_tokens),
        max_running_requests=_least_over_ranks(plan.max_requests),
        mem_fraction_static=schedule.mem_fraction_static,
    )


def place_weights(options: RaggedOptions, original: Callable, model: Any, weights: Any, target_device: Any) -> None:
    """Load a checkpoint with its attention heads in the order of the placement."""
    if options.placement is None:
        return original(model, weights, target_device)
    order = HeadOrder(options.placement, _geometry(options))
    original(model, order.reorder(weights), target_device)
    order.require_all()
    # Every way in which SGLang updates weights at run time looks for this attribute first, and answers with it.
    model._derived_weight_cache_error = NO_WEIGHT_UPDATES


def repeat_heads_on_cpus(
    options: RaggedOptions, original: Callable, model_config: Any, load_config: Any, tp_size: int
) -> Any:
    """With more ranks than heads, every head on several ranks, as on GPUs; and no change to a model with more heads.

    On CPUs SGLang adds heads of zeros instead, which budgets know nothing of; and without AMX it cannot load them.
    """
    if tp_size > _geometry(options).num_heads or (options.placement is not None and options.placement.splits_heads):
        return model_config
    return original(model_config, load_config, tp_size)


def build_pool(
    options: RaggedOptions, original: Callable, configurator: Any, *, sizes: Any, req_to_token_pool: Any, **_: Any
) -> Any:
    """The ragged pool in place of SGLang's, and the start-up line."""
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.mem_pool.pool import RaggedTokenToKVPool
    from sgl_ragged.scorers import get_scorer

    layout = _layout(options)
    plan = PoolPlan(
        layout=layout,
        itemsize=configurator.kv_cache_dtype.itemsize,
        num_slots=sizes.max_total_num_tokens // options.segment + 1,
        num_rows=req_to_token_pool.size + 1,
        side_bytes=_side_bytes(options, configurator, layout),
    )
    parallel, geometry = get_parallel(), _geometry(options)
    statistics = [
        {name: tensor.to(configurator.device) for name, tensor in layer.items()}
        for layer in rank_statistics(options, geometry, parallel.attn_tp_rank, parallel.attn_tp_size)
    ]
    pool = RaggedTokenToKVPool(
        plan,
        get_scorer(options.scorer),
        statistics,
        q_per_kv=_q_per_kv(options),
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
    )
    budgets = served_budgets(options)
    logger.info("%s; digest of what is served %s", budgets.source, budgets.digest)
    if options.placement is not None:
        logger.info("%s", describe_placement(options.placement, budgets.kept))
    logger.info("ragged KV pool (ratio %s, scorer %s): %s", options.ratio, options.scorer, plan.describe())
    if plan.warning is not None:
        logger.warning("%s", plan.warning)
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

    if options.placement is not None and not hasattr(model_runner.model, "_derived_weight_cache_error"):
        raise RaggedConfigError(
            "SGLang loaded the model without the loader that places heads on ranks; use --ragged-fairkv none"
        )
    observer = options.observer and options.observer.for_rank(get_parallel().attn_tp_rank)
    kernel = choose_kernel(options.kernel, torch.device(model_runner.device).type)
    logger.info("ragged attention kernels: %s", kernel)
    return RaggedAttnBackend(
        model_runner, functools.partial(make_operations, kernel), observer, _exchange(options, model_runner.device)
    )


def _exchange(options: RaggedOptions, device: str) -> LseExchange | None:
    from sglang.srt.runtime_context import get_parallel

    if options.placement is None or not options.placement.splits_heads:
        return None
    parallel = get_parallel()
    gather = functools.partial(parallel.attn_tp_group.all_gather, dim=0)
    return LseExchange(options.placement, parallel.attn_tp_rank, device, gather)


def _geometry(options: RaggedOptions) -> ModelGeometry:
    assert options.geometry is not None, "the launcher settles the options before any worker starts"
    return options.geometry


def _q_per_kv(options: RaggedOptions) -> int:
    """Query heads of this rank per head: with more ranks than heads, the ranks of a head share its query heads."""
    from sglang.srt.runtime_context import get_parallel

    geometry = _geometry(options)
    return geometry.q_per_kv // max(get_parallel().attn_tp_size // geometry.num_heads, 1)


def _layout(options: RaggedOptions) -> SlabLayout:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return rank_layout(options, _geometry(options), parallel.attn_tp_rank, parallel.attn_tp_size)


def _side_bytes(options: RaggedOptions, configurator: Any, layout: Any) -> int:
    """Bytes per request row that the scorer keeps beside the tail."""
    from sgl_ragged.mem_pool.slab_store import side_bytes
    from sgl_ragged.scorers import get_scorer

    return side_bytes(get_scorer(options.scorer), layout, _q_per_kv(options), configurator.kv_cache_dtype)


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

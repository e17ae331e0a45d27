"""The hooks that run in a worker: sizing, the pool, the attention backend. Installed by `hooks`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_ragged.attention.kernel_choice import make_operations
from sgl_ragged.attention.self_check import check_operations
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.planner import describe_placement
from sgl_ragged.fairkv.weights import HeadOrder
from sgl_ragged.launch.plan import Prefill, ServingPlan, WorkerSettings
from sgl_ragged.mem_pool.kv_dtype import beside_cache, describe_scales, refuse_kv_dtype
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.rank_sizes import RankNeeds, rank_needs, summary
from sgl_ragged.serve import weight_updates
from sgl_ragged.serve.allocation_hooks import build_allocator
from sgl_ragged.serve.backend import RaggedAttnBackend, attention_layers
from sgl_ragged.serve.feature import Worker, joined_features, side_pool
from sgl_ragged.serve.pool import RaggedTokenToKVPool, slab_pool
from sgl_ragged.serve.ranks import least_over_ranks, require_equal_digests
from sgl_ragged.serve.refusal import ending_worker
from sgl_ragged.serve.store_maker import StoreMaker

if TYPE_CHECKING:
    import torch

    from sgl_ragged.attention.epilogue import Epilogue

logger = logging.getLogger(__name__)

NO_WEIGHT_UPDATES = (
    "weights cannot be updated at run time while heads are placed on other ranks than the checkpoint's order gives; "
    "restart with --ragged-fairkv none"
)
"""SGLang's answer to requests that would write weights in the checkpoint's order."""


def kv_bytes(serving: WorkerSettings, original: Callable, configurator: Any, pre_model_load_memory: int) -> int:
    """Use --kv-bytes instead of profiling free memory, for SGLang's own pool."""
    return serving.kv_bytes if serving.kv_bytes is not None else original(configurator, pre_model_load_memory)


def configurator_class(serving: WorkerSettings) -> type:
    """Make the class that sizes and builds pools of slabs, in place of SGLang's `KVCacheConfigurator`."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    def refusing(function: Callable) -> Callable:
        return ending_worker(functools.partial(function, serving), serving.from_command_line)

    class SlabConfigurator(KVCacheConfigurator):
        def _resolve_memory_pool_config(self, pre_model_load_memory: int) -> Any:
            return refusing(size_pool)(self, pre_model_load_memory)

        def _build_token_to_kv_pool(self, **more: Any) -> Any:
            return refusing(build_pool)(self, super()._build_token_to_kv_pool, **more)

        def _build_token_to_kv_pool_allocator(self, **more: Any) -> Any:
            return refusing(build_allocator)(super()._build_token_to_kv_pool_allocator, **more)

    return SlabConfigurator


def size_pool(serving: WorkerSettings, configurator: Any, pre_model_load_memory: int) -> Any:
    """Compute slots and request rows from the KV budget, instead of tokens from bytes per token."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_parallel, get_schedule

    refuse_kv_dtype(configurator.kv_cache_dtype)
    plan, schedule, parallel = serving.served_plan, get_schedule(), get_parallel()
    ranks, group = parallel.world_group.world_size, parallel.world_group.cpu_group
    require_equal_digests(plan.digest, ranks, group)
    budget = serving.kv_bytes
    if budget is None:
        budget = configurator._profile_available_bytes(pre_model_load_memory)
    needs = _needs(plan, configurator)
    sizes = needs.fit(budget, schedule.max_running_requests, schedule.max_total_tokens)
    tokens = least_over_ranks(sizes.max_total_tokens, ranks, group)
    side = side_pool(plan)
    both: dict[str, int] = {}
    if side is not None:
        pages = least_over_ranks(sizes.side_pages, ranks, group)
        both = side.pool_config(tokens, (pages - 1) * plan.segment)
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=least_over_ranks(sizes.max_requests, ranks, group),
        mem_fraction_static=schedule.mem_fraction_static,
        **both,
    )


def place_weights(serving: WorkerSettings, original: Callable, model: Any, weights: Any, target_device: Any) -> None:
    """Load a checkpoint with its attention heads in the order of the placement."""
    plan = serving.served_plan
    if plan.placement is None:
        return original(model, weights, target_device)
    order = HeadOrder(plan.placement, plan.geometry)
    original(model, order.reorder(weights), target_device)
    order.require_all()
    # Every way in which SGLang updates weights at run time looks for this attribute first, and answers with it.
    model._derived_weight_cache_error = NO_WEIGHT_UPDATES


def repeat_heads_on_cpus(
    serving: WorkerSettings, original: Callable, model_config: Any, load_config: Any, tp_size: int
) -> Any:
    """Repeat heads over ranks as on GPUs if there are more ranks than heads; leave other models unchanged.

    On CPUs SGLang adds heads of zeros instead, which budgets do not count, and without AMX it cannot load them.
    """
    plan = serving.served_plan
    if tp_size > plan.geometry.num_heads or (plan.placement is not None and plan.placement.splits_heads):
        return model_config
    return original(model_config, load_config, tp_size)


def build_pool(
    serving: WorkerSettings, configurator: Any, original: Callable, *, sizes: Any, req_to_token_pool: Any, **more: Any
) -> Any:
    """Build the ragged pool instead of SGLang's, or a feature's own, and log the start-up lines."""
    import torch

    plan = serving.served_plan
    build = functools.partial(original, sizes=sizes, req_to_token_pool=req_to_token_pool, **more)
    own = [feature.own_pool(settings, configurator, build) for feature, settings in joined_features(plan)]
    found = next((one for one in own if one is not None), None)
    if found is not None:
        return found
    needs, side = _needs(plan, configurator), side_pool(plan)
    side_pages = 0 if side is None else side.side_tokens(sizes) // plan.segment + 1
    pool_sizes = needs.made(sizes.max_total_num_tokens // plan.segment + 1, req_to_token_pool.size + 1, side_pages)
    rank = needs.rank
    statistics = [
        {name: torch.from_numpy(array).to(configurator.device) for name, array in tensors.items()}
        for tensors in rank.plan.rank_statistics(rank.number)
    ]
    layer_numbers, dtype = rank.plan.geometry.layer_numbers, configurator.kv_cache_dtype
    scales = [layer.scaling for layer in attention_layers(configurator.model, layer_numbers)]
    maker = StoreMaker(
        pool_sizes.layout,
        plan.scorer,
        plan.kernel,
        dtype,
        _query_dtype(configurator),
        configurator.device,
        plan.q_per_kv,
        statistics,
        scales,
    )
    store = maker.make(pool_sizes.num_slots, pool_sizes.num_rows, pool_sizes.open_pages)
    pool = RaggedTokenToKVPool(pool_sizes, store, device=configurator.device, layer_numbers=layer_numbers)
    pool.make_small_store = maker.make_small
    outer: Any = pool
    for feature, settings in joined_features(plan):
        outer = feature.attach(settings, Worker(serving, rank, pool, outer, sizes, req_to_token_pool.req_to_token))
    logger.info("%s; digest of the plan %s", plan.source, plan.digest)
    if plan.placement is not None:
        logger.info("%s", describe_placement(plan.placement, plan.kept))
    logger.info("%s", plan.fit)
    for line in summary(plan, pool_sizes):
        logger.info("%s", line)
    if pool_sizes.warning is not None:
        logger.warning("%s", pool_sizes.warning)
    return outer


def no_fused_kv_write(original: Callable, forward_batch: Any) -> bool:
    """Have models hand K and V to the backend: a kernel that writes by token location would miss the slabs."""
    return False


def create_backend(serving: WorkerSettings, model_runner: Any) -> Any:
    """Make the attention backend `launch.plan.BACKEND` for SGLang."""
    from sglang.srt.runtime_context import get_parallel

    plan = serving.served_plan
    if plan.placement is not None and not hasattr(model_runner.model, "_derived_weight_cache_error"):
        raise RaggedConfigError(
            "SGLang loaded the model without the loader that places heads on ranks; use --ragged-fairkv none"
        )
    fixed = slab_pool(model_runner.token_to_kv_pool).fixed_weights
    if fixed is not None:
        model_runner.model._derived_weight_cache_error = fixed
    side = side_pool(plan)
    observer = serving.observer and serving.observer.for_rank(get_parallel().attn_tp_rank)
    logger.info("ragged attention kernels: %s", plan.kernel)
    backend = RaggedAttnBackend(
        model_runner,
        functools.partial(make_operations, plan.kernel),
        observer,
        _exchanges(plan, model_runner.device),
        None if side is None else side.layer_backend(model_runner, plan.kernel),
    )
    if backend.store.fp8:
        logger.info("KV cache in %s, %s", backend.store.dtype, describe_scales(backend.store.kv_scales))
    for line in backend.operations.summary():
        logger.info("%s", line)
    _check_kernels(plan, backend)
    weight_updates.attach(plan, backend, model_runner)
    return backend


def _check_kernels(plan: ServingPlan, backend: RaggedAttnBackend) -> None:
    """Compare the kernels with dense attention, once. Raises RaggedConfigError where they differ."""
    pool, make_small = backend.pool, backend.pool.make_small_store
    if make_small is None:
        return

    def make_store(layers: Sequence[int], requests: int, segments: int) -> SlabStore:
        store = make_small(layers, requests, segments)
        store.use_kv_scales([backend.store.kv_scales[layer] for layer in layers])
        return store

    chains = pool.open_segments.chains
    pool.self_check = check_operations(make_store, pool.sizes.layout, plan.kernel, chains.width if chains else 0)
    # It holds a copy of the codebook.
    pool.make_small_store = None
    logger.info("%s", pool.self_check)


def _exchanges(plan: ServingPlan, device: str) -> list[Epilogue]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if plan.placement is None or not plan.placement.splits_heads:
        return []
    plan = plan.stage(parallel.pp_rank)
    assert plan.placement is not None, "the stage is placed like the whole"
    gather = functools.partial(parallel.attn_tp_group.all_gather, dim=0)
    return [LseExchange(plan.placement, parallel.attn_tp_rank, device, gather)]


def _needs(plan: ServingPlan, configurator: Any) -> RankNeeds:
    """Return this rank's needs, with the plan of its pipeline stage."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    parallel, schedule = get_parallel(), get_schedule()
    if plan.stages:
        layers = configurator.layer_info.start_layer, configurator.layer_info.end_layer
        if layers != plan.stages[parallel.pp_rank]:
            raise RaggedConfigError(
                f"SGLang gives pipeline stage {parallel.pp_rank} layers {layers}, the plan {plan.stages}: give all "
                f"nodes the same SGLANG_PP_LAYER_PARTITION"
            )
    chunk = schedule.chunked_prefill_size
    longest = chunk if chunk is not None and chunk > 0 else configurator.model_config.context_len
    dtypes = configurator.kv_cache_dtype, _query_dtype(configurator)
    return rank_needs(plan, parallel.pp_rank, parallel.attn_tp_rank, Prefill(longest, schedule), *dtypes)


def _query_dtype(configurator: Any) -> torch.dtype:
    """Dtype of queries that are kept for the scorer."""
    return beside_cache(configurator.kv_cache_dtype, configurator.model_config.dtype)

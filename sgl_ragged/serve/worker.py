"""The hooks that run in a worker: sizing, the pool, the attention backend. Installed by `seams`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.weights import HeadOrder
from sgl_ragged.launch.feature import Feature, Prefill, Rank, Worker, joined_features
from sgl_ragged.launch.joining import feature_bytes, page_bytes, side_pages
from sgl_ragged.launch.models import refuse_kv_dtype
from sgl_ragged.launch.options import RaggedOptions, serving_plan
from sgl_ragged.launch.placing import describe_placement
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages, fit_pool
from sgl_ragged.serve.metrics import summary
from sgl_ragged.serve.ranks import least_over_ranks, require_equal_digests

if TYPE_CHECKING:
    import torch

    from sgl_ragged.attention.epilogue import Epilogue

logger = logging.getLogger(__name__)

NO_WEIGHT_UPDATES = (
    "weights cannot be updated at run time while heads are placed on other ranks than the checkpoint's order gives; "
    "restart with --ragged-fairkv none"
)
"""What SGLang answers to requests that would write weights in the checkpoint's order."""


def kv_bytes(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> int:
    """Uses --kv-bytes instead of profiling free memory, for either pool."""
    return options.kv_bytes if options.kv_bytes is not None else original(configurator, pre_model_load_memory)


def size_pool(options: RaggedOptions, original: Callable, configurator: Any, pre_model_load_memory: int) -> Any:
    """Computes slots and request rows from the KV budget, instead of tokens from bytes per token."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_parallel, get_schedule

    refuse_kv_dtype(configurator.kv_cache_dtype)
    schedule, serving, parallel = get_schedule(), serving_plan(options), get_parallel()
    ranks, group = parallel.world_group.world_size, parallel.world_group.cpu_group
    require_equal_digests(serving.digest, ranks, group)
    budget = configurator._profile_available_bytes(pre_model_load_memory)
    rank = _rank(serving, configurator)
    owner, beside = _side_pages(rank, configurator)
    plan = fit_pool(
        rank.plan.layout(rank.number),
        rank.itemsize,
        _open_pages(serving, configurator),
        budget,
        schedule.max_running_requests,
        _side_bytes(rank, configurator),
        schedule.max_total_tokens,
        beside,
        page_bytes(rank),
    )
    tokens = least_over_ranks(plan.max_total_tokens, ranks, group)
    both: dict[str, int] = {}
    if owner is not None:
        pages = least_over_ranks(plan.side_pages, ranks, group)
        both = owner.pool_config(tokens, (pages - 1) * serving.segment)
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=least_over_ranks(plan.max_requests, ranks, group),
        mem_fraction_static=schedule.mem_fraction_static,
        **both,
    )


def place_weights(options: RaggedOptions, original: Callable, model: Any, weights: Any, target_device: Any) -> None:
    """Load a checkpoint with its attention heads in the order of the placement."""
    plan = serving_plan(options)
    if plan.placement is None:
        return original(model, weights, target_device)
    order = HeadOrder(plan.placement, plan.geometry)
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
    plan = serving_plan(options)
    if tp_size > plan.geometry.num_heads or (plan.placement is not None and plan.placement.splits_heads):
        return model_config
    return original(model_config, load_config, tp_size)


def build_pool(
    options: RaggedOptions, original: Callable, configurator: Any, *, sizes: Any, req_to_token_pool: Any, **more: Any
) -> Any:
    """Builds the ragged pool instead of SGLang's, and logs the start-up line. Features may have pools of their own."""
    import torch

    from sgl_ragged.scorers import get_scorer
    from sgl_ragged.serve.pool import RaggedTokenToKVPool

    serving = serving_plan(options)
    build = functools.partial(original, configurator, sizes=sizes, req_to_token_pool=req_to_token_pool, **more)
    own = [feature.own_pool(settings, configurator, build) for feature, settings in joined_features(serving)]
    found = next((one for one in own if one is not None), None)
    if found is not None:
        return found
    rank = _rank(serving, configurator)
    owner, beside = _side_pages(rank, configurator)
    plan = PoolSizes(
        layout=rank.plan.layout(rank.number),
        itemsize=rank.itemsize,
        open_pages=_open_pages(serving, configurator),
        num_slots=sizes.max_total_num_tokens // serving.segment + 1,
        num_rows=req_to_token_pool.size + 1,
        side_bytes=_side_bytes(rank, configurator),
        beside_bytes=page_bytes(rank),
    )
    if owner is not None and beside is not None:
        plan = replace(
            plan,
            side_pages=owner.page_tokens(sizes) // serving.segment + 1,
            side_page_bytes=beside.page_bytes,
            side_pages_of=beside.what,
        )
    statistics = [
        {name: torch.from_numpy(array).to(configurator.device) for name, array in tensors.items()}
        for tensors in rank.plan.rank_statistics(rank.number)
    ]
    pool = RaggedTokenToKVPool(
        plan,
        get_scorer(serving.scorer),
        statistics,
        q_per_kv=serving.q_per_kv,
        dtype=configurator.kv_cache_dtype,
        query_dtype=_query_dtype(configurator),
        device=configurator.device,
        layer_numbers=rank.plan.geometry.layer_numbers,
    )
    given: Any = pool
    for feature, settings in joined_features(serving):
        given = feature.attach(settings, Worker(options, rank, pool, given, sizes, req_to_token_pool.req_to_token))
    logger.info("%s; digest of the plan %s", serving.source, serving.digest)
    if serving.placement is not None:
        logger.info("%s", describe_placement(serving.placement, serving.kept))
    logger.info("%s", serving.fit)
    for line in summary(serving, plan):
        logger.info("%s", line)
    if plan.warning is not None:
        logger.warning("%s", plan.warning)
    return given


def no_fused_kv_write(options: RaggedOptions, original: Callable, forward_batch: Any) -> bool:
    """Makes models hand K and V to the backend: a kernel that writes them by token location would miss the slabs."""
    return False


def create_backend(options: RaggedOptions, model_runner: Any) -> Any:
    """SGLang's factory of the attention backend called `seams.BACKEND`."""
    from sglang.srt.runtime_context import get_parallel

    from sgl_ragged.attention.kernel_choice import make_operations
    from sgl_ragged.mem_pool.kv_dtype import describe_scales
    from sgl_ragged.serve import weight_updates
    from sgl_ragged.serve.backend import RaggedAttnBackend

    plan = serving_plan(options)
    if plan.placement is not None and not hasattr(model_runner.model, "_derived_weight_cache_error"):
        raise RaggedConfigError(
            "SGLang loaded the model without the loader that places heads on ranks; use --ragged-fairkv none"
        )
    others = None
    for feature, _ in joined_features(plan):
        why = feature.why_weights_stay()
        if why is not None:
            model_runner.model._derived_weight_cache_error = why
        others = feature.layer_backend(model_runner, plan.kernel) or others
    observer = options.observer and options.observer.for_rank(get_parallel().attn_tp_rank)
    logger.info("ragged attention kernels: %s", plan.kernel)
    backend = RaggedAttnBackend(
        model_runner,
        functools.partial(make_operations, plan.kernel),
        observer,
        _exchanges(plan, model_runner.device),
        others,
    )
    if backend.store.fp8:
        logger.info("KV cache in %s, %s", backend.store.dtype, describe_scales(backend.store.kv_scales))
    weight_updates.attach(plan, backend, model_runner)
    return backend


def _exchanges(plan: ServingPlan, device: str) -> list[Epilogue]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if plan.placement is None or not plan.placement.splits_heads:
        return []
    plan = plan.stage(parallel.pp_rank)
    assert plan.placement is not None, "the stage is placed like the whole"
    gather = functools.partial(parallel.attn_tp_group.all_gather, dim=0)
    return [LseExchange(plan.placement, parallel.attn_tp_rank, device, gather)]


def _rank(plan: ServingPlan, configurator: Any) -> Rank:
    """This rank, with the plan of its pipeline stage."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    itemsizes = configurator.kv_cache_dtype.itemsize, _query_dtype(configurator).itemsize
    if plan.stages:
        layers = configurator.layer_info.start_layer, configurator.layer_info.end_layer
        if layers != plan.stages[parallel.pp_rank]:
            raise RaggedConfigError(
                f"SGLang gives pipeline stage {parallel.pp_rank} layers {layers}, the plan {plan.stages}: give all "
                f"nodes the same SGLANG_PP_LAYER_PARTITION"
            )
    return Rank(plan.stage(parallel.pp_rank), parallel.attn_tp_rank, *itemsizes)


def _side_bytes(rank: Rank, configurator: Any) -> int:
    """Bytes per request row beside the tail: what the scorer keeps, and features."""
    from sgl_ragged.mem_pool.slab_store import side_bytes
    from sgl_ragged.scorers import get_scorer

    plan = rank.plan
    scored = side_bytes(get_scorer(plan.scorer), plan.layout(rank.number), plan.q_per_kv, _query_dtype(configurator))
    return scored + feature_bytes(rank)


def _open_pages(plan: ServingPlan, configurator: Any) -> OpenPages:
    from sgl_ragged.mem_pool.slab_store import open_pages
    from sgl_ragged.scorers import get_scorer

    dtypes = configurator.kv_cache_dtype, _query_dtype(configurator)
    return open_pages(get_scorer(plan.scorer), plan.slab_layouts, plan.q_per_kv, *dtypes)


def _query_dtype(configurator: Any) -> torch.dtype:
    """Of queries that are kept beside the tails."""
    from sgl_ragged.mem_pool.kv_dtype import beside_cache

    return beside_cache(configurator.kv_cache_dtype, configurator.model_config.dtype)


def _side_pages(rank: Rank, configurator: Any) -> tuple[Feature | None, SidePages | None]:
    """The feature that needs pages beside slabs, and these."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    longest = chunk if chunk is not None and chunk > 0 else configurator.model_config.context_len
    return side_pages(rank, Prefill(longest, schedule))

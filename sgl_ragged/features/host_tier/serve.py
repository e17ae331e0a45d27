"""The host tier in a worker: SGLang's HiCache with a pool and a controller for slabs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.features.host_tier.controller import RaggedStack, build_stack
from sgl_ragged.features.host_tier.tier_plan import TierPlan
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker
from sgl_ragged.serve.pool import slab_pool
from sgl_ragged.serve.refusal import ending_worker

HOLDS_WEIGHTS = (
    "weights cannot be updated at run time while a tier below the device holds slabs of the ones before; restart "
    "without --enable-hierarchical-cache"
)
"""SGLang's answer to requests that would write any weights."""


def recompute_segments(original: Callable, worker: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """Before a batch, compute the segments of its cached prefixes that were not loaded; time its prefill."""
    restorer = slab_pool(worker.model_runner.token_to_kv_pool).attached.get("tier")
    if batch is None or restorer is None:
        return original(worker, batch, *args, **more)
    restorer.run(worker, batch)
    if not batch.forward_mode.is_extend_without_speculative():
        return original(worker, batch, *args, **more)
    with restorer.prefill.measuring(batch.extend_num_tokens / restorer.pool.page_size):
        return original(worker, batch, *args, **more)


class HostTier(ServeFeature):
    """Settings: `tier_plan.TierPlan`."""

    name = "tier"
    hooks = (Hook(sglang.RUN_BATCH, recompute_segments),)

    def attach(self, settings: TierPlan, worker: Worker) -> Any:
        def build(**asked: Any) -> Any:
            return build_stack(settings, **asked)

        worker.pool.fixed_weights = HOLDS_WEIGHTS
        register_stack_strategy(RaggedStack(ending_worker(build, worker.serving.from_command_line)))
        return worker.outer

    def server_info(self, settings: TierPlan | None, pool: Any) -> dict[str, Any]:
        restorer = pool.attached.get(self.name)
        if settings is None or restorer is None:
            return {"tier": None}
        return {"tier": {"restore": settings.restore} | restorer.settings()}


FEATURE = HostTier()

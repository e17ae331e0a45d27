"""The hooks of the host tier in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_ragged.launch.options import RaggedOptions

if TYPE_CHECKING:
    from sgl_ragged.features.host_tier.tier_plan import TierPlan


def register_stack(tier: TierPlan, options: RaggedOptions) -> None:
    """Have SGLang's HiCache build its host pool and controller for slabs."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

    from sgl_ragged.features.host_tier.controller import RaggedStack, build_stack
    from sgl_ragged.serve.refusal import bind

    def build(_: RaggedOptions, **asked: Any) -> Any:
        return build_stack(tier, **asked)

    register_stack_strategy(RaggedStack(bind(build, options)))


def recompute_segments(
    options: RaggedOptions, original: Callable, worker: Any, batch: Any, *args: Any, **more: Any
) -> Any:
    """Before a batch, the segments of its cached prefixes that were not loaded; its prefill is timed."""
    from sgl_ragged.features.windows.pool import slab_pool

    restorer = slab_pool(worker.model_runner.token_to_kv_pool).attached.get("tier")
    if batch is None or restorer is None:
        return original(worker, batch, *args, **more)
    restorer.run(worker, batch)
    if not batch.forward_mode.is_extend_without_speculative():
        return original(worker, batch, *args, **more)
    with restorer.prefill.measuring(batch.extend_num_tokens / restorer.pool.page_size):
        return original(worker, batch, *args, **more)

"""The hooks of the host tier in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ragged.plugin.options import RaggedOptions, serving_plan


def build_tier(options: RaggedOptions, **asked: Any) -> Any:
    """Host pool and controller of SGLang's HiCache."""
    from sgl_ragged.host_tier.sglang_controller import build_stack

    tier = serving_plan(options).tier
    assert tier is not None, "it was registered because there is one"
    return build_stack(tier, **asked)


def recompute_segments(
    options: RaggedOptions, original: Callable, worker: Any, batch: Any, *args: Any, **more: Any
) -> Any:
    """Before a batch, the segments of its cached prefixes that were not loaded; its prefill is timed."""
    from sgl_ragged.windows.sglang_pool import slab_pool

    restorer = slab_pool(worker.model_runner.token_to_kv_pool).tier
    if batch is None or restorer is None:
        return original(worker, batch, *args, **more)
    restorer.run(worker, batch)
    if not batch.forward_mode.is_extend():
        return original(worker, batch, *args, **more)
    with restorer.prefill.measuring(batch.extend_num_tokens / restorer.pool.page_size):
        return original(worker, batch, *args, **more)

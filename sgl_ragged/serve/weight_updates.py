"""Updates of weights at run time: FP8 scales are read again; what cannot be is reported to operators.

The hooks run in the scheduler. Budgets, gates, codebook and expected queries come from a profile of the weights that
the server started with. A checkpoint does not carry them, so they stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.mem_pool.kv_dtype import describe_scales
from sgl_ragged.serve.metrics import write_metrics
from sgl_ragged.serve.pool import slab_allocator, slab_pool

if TYPE_CHECKING:
    from sgl_ragged.serve.backend import RaggedAttnBackend

logger = logging.getLogger(__name__)

NAME = "weights"
"""Key of `ServedWeights` in `RaggedTokenToKVPool.attached`."""

PROFILE_STAYS = (
    "weights were updated at run time, but the profile (%s) is that of the weights that the server started with: "
    "answers are right for the new weights, compression is chosen by the old ones; calibrate the new checkpoint and "
    "restart when they have moved far (this is logged once; sglang:ragged_profile_of_first_weights says it from now on)"
)
SCALES_WAIT = (
    "the new weights have other FP8 scales, and the cache still holds keys and values stored with the old ones; the "
    "new scales take effect when the cache is flushed: call /flush_cache, or update with flush_cache=true"
)


class ServedWeights:
    """Track updates of one rank's weights, and which FP8 scales are in use.

    Args:
        backend: its store holds the FP8 scales.
        derived: what comes from a profile, for the log; empty where nothing does.
        recapture: captures CUDA graphs again. Their kernels have the scales as constants.
    """

    gauges: ClassVar = {
        "profile_of_first_weights": "1 once weights were updated at run time while budgets, scorer or fit are those of "
        "the weights at start, else 0.",
        "kv_scales_wait": "1 while FP8 scales of updated weights wait for the cache to be flushed, else 0.",
    }
    counters: ClassVar = {"weight_updates": "Updates of weights at run time on this rank."}
    label: ClassVar = ""

    def __init__(self, backend: RaggedAttnBackend, derived: str, recapture: Callable[[], None]) -> None:
        self._backend, self._derived, self._recapture = backend, derived, recapture
        self.updates = 0
        self.scales_wait = False

    @property
    def profile_of_first_weights(self) -> bool:
        return self.updates > 0 and bool(self._derived)

    def count_update(self) -> None:
        """Count an update of the served weights; log the first one."""
        self.updates += 1
        if self.updates == 1 and self._derived:
            logger.warning(PROFILE_STAYS, self._derived)

    def read_scales(self, cache_is_empty: bool) -> str | None:
        """Use the scales on the model's layers, unless the cache holds keys stored with other scales.

        Returns:
            Why the scales of the new weights cannot be used, or None.
        """
        if not self._backend.store.fp8:
            return None
        try:
            found = self._backend.found_scales()
        except RaggedConfigError as error:
            return f"Weights were updated, but FP8 scales stay those of the weights before: {error}"
        changed = found != self._backend.kv_scales
        self.scales_wait = changed and not cache_is_empty
        if self.scales_wait:
            logger.warning(SCALES_WAIT)
        elif changed:
            self._backend.use_scales(found)
            logger.info("KV cache in %s, %s", self._backend.store.dtype, describe_scales(found))
            self._recapture()
        return None

    def cache_flushed(self) -> None:
        """Use FP8 scales that waited for an empty cache."""
        error = self.read_scales(cache_is_empty=True)
        if error is not None:
            logger.error(error)

    def readings(self) -> Mapping[tuple[str, str], float]:
        """Return metric values by name and label."""
        return {
            ("profile_of_first_weights", ""): float(self.profile_of_first_weights),
            ("kv_scales_wait", ""): float(self.scales_wait),
            ("weight_updates", ""): float(self.updates),
        }


def derived_from_weights(plan: ServingPlan) -> str:
    """Name the parts of a plan that were made from the weights at start; empty if there are none."""
    parts = [
        (plan.kept.min() < plan.kept.max(), "budgets"),
        (any(plan.statistics), f"tensors of scorer {plan.scorer}"),
        (plan.unfitted is None, "fit"),
    ]
    return ", ".join(text for applies, text in parts if applies)


def attach(plan: ServingPlan, backend: RaggedAttnBackend, model_runner: Any) -> None:
    """Put a `ServedWeights` where metrics and the hooks of this module find it."""

    def recapture() -> None:
        graphs = model_runner.decode_cuda_graph_runner
        if graphs is not None and graphs is not model_runner.eager_runner:
            model_runner.recapture_decode_cuda_graph()

    backend.pool.attached[NAME] = weights = ServedWeights(backend, derived_from_weights(plan), recapture)
    backend.pool.on_flush.append(weights.cache_flushed)


def _found(scheduler: Any) -> tuple[ServedWeights, bool]:
    """Return the rank's `ServedWeights`, and True if its cache is empty."""
    allocator = scheduler.token_to_kv_pool_allocator
    pages = slab_allocator(allocator)
    return slab_pool(allocator.get_kvcache()).attached[NAME], pages.available_size() == pages.size


def weights_changed(original: Callable, manager: Any, request: Any, success: bool, message: str) -> tuple[bool, str]:
    """Count an update of weights; read FP8 scales after SGLang has flushed the cache, if the request wants that."""
    _found(manager.scheduler)[0].count_update()
    success, message = original(manager, request, success, message)
    weights, empty = _found(manager.scheduler)
    error = weights.read_scales(empty)
    write_metrics(manager.scheduler)
    return (success, message) if error is None else (False, error)


def update_session_ended(original: Callable, manager: Any, request: Any) -> Any:
    """Read FP8 scales at the end of an update session, in which they may have been written without a call."""
    session = manager._session
    answer = original(manager, request)
    if session is None or not answer.success:
        return answer
    weights, empty = _found(manager.scheduler)
    if not session.loaded_weights:
        weights.count_update()
    error = weights.read_scales(empty)
    write_metrics(manager.scheduler)
    return answer if error is None else type(answer)(success=False, message=error)


def internal_state(original: Callable, scheduler: Any, request: Any) -> Any:
    """Add `ragged` to a scheduler's state in /server_info, which is read at each request."""
    answer = original(scheduler, request)
    weights, _ = _found(scheduler)
    answer.internal_state["ragged"] = {
        "weight_updates": weights.updates,
        "profile_of_first_weights": weights.profile_of_first_weights,
        "kv_scales_wait": weights.scales_wait,
    }
    return answer

"""What --ragged-history means for a server: the bound, the chunks of prefill, and what it does not go with."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.history.bound import AUTO, NOVELTY, RECENCY, HistoryBound, history_bound
from sgl_ragged.history.sglang_feature import HISTORY
from sgl_ragged.plan import ServingPlan
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.windows.sizes import window_pages

logger = logging.getLogger(__name__)


def plan_history(server_args: Any, options: RaggedOptions) -> HistoryBound | None:
    """The bound that was asked for. Raises RaggedConfigError for flags that do not go with it."""
    if options.history is None:
        if options.history_score is not None:
            raise RaggedConfigError(
                "--ragged-history-score says what leaves a bounded history, and this one is not: add --ragged-history, "
                "or drop the flag"
            )
        return None
    HISTORY.require()
    bound = history_bound(options.history, options.history_score or AUTO, options.segment)
    assert bound is not None
    chunk = server_args.chunked_prefill_size
    most = bound.latest * options.segment
    if chunk is not None and not 0 < chunk <= most:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} does not go with --ragged-history {options.history}: which segments "
            f"leave is known {most} tokens ahead, so chunks have at most as many; use {most}, or drop the flag"
        )
    return bound


def chunk_size(chunk: int, segment: int, bound: HistoryBound | None) -> int:
    """Tokens of a chunk of prefill: whole segments, and no more than it is known ahead what leaves; -1 for no chunks.

    chunk: SGLang's default, or what the user gave, which is checked before.
    """
    if bound is not None:
        most = bound.latest * segment
        chunk = most if chunk <= 0 else min(chunk, most)
    return max(chunk // segment, 1) * segment if chunk > 0 else chunk


def with_lag(bound: HistoryBound, geometry: ModelGeometry, segment: int) -> HistoryBound:
    """The bound for a model that may have sliding-window layers: a page goes back once these have left it, too.

    Raises RaggedConfigError where SGLang is told to keep windows through prefill.
    """
    if geometry.windowed is None:
        return bound
    from sglang.srt.environ import envs

    from sgl_ragged.windows.sglang_pool import eviction_interval

    if not envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS.get():
        raise RaggedConfigError(
            "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS=0 keeps the windows of a whole prompt, and pages of "
            "--ragged-history go back when windows have left them; unset it, or drop --ragged-history"
        )
    return replace(bound, lag=window_pages(geometry.windowed.window, eviction_interval(), segment) - 1)


def with_history(plan: ServingPlan, bound: HistoryBound | None) -> ServingPlan:
    """The plan with a bound, whose score and lag are settled. Raises RaggedConfigError for what it does not go with."""
    if bound is None:
        return plan
    bound = with_lag(bound, plan.geometry, plan.segment)
    if bound.score == AUTO:
        bound = replace(bound, score=RECENCY if plan.value_mean is None else NOVELTY)
        if bound.by_age:
            logger.warning(
                "--ragged-history: the oldest segment leaves, since there are no calibrated means of values to choose "
                "by; a profile that calib run makes has them"
            )
    if bound.score == NOVELTY and plan.value_mean is None:
        raise RaggedConfigError(
            f"--ragged-history-score {NOVELTY} needs the means of values that calibration records, and the profile has "
            f"none: calibrate again (python -m calib run), or use --ragged-history-score {RECENCY}"
        )
    return replace(plan, history=bound)

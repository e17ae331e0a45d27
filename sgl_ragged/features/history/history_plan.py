"""What --ragged-history means for a server: the bound, the chunks of prefill, and what its scores need."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.history.bound import AUTO, NOVELTY, RECENCY, HistoryBound, history_bound
from sgl_ragged.features.history.launch import HistoryFlags
from sgl_ragged.features.windows.sizes import window_pages
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import Launch
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import VALUE_MEAN

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HistoryPlan:
    """value_mean: float32 [layers, heads, head_dim], mean values of the model's heads, if the profile has them."""

    bound: HistoryBound
    value_mean: np.ndarray | None

    @property
    def state(self) -> tuple[Any, ...]:
        """For the plan's digest."""
        numbers = (self.bound.limit, self.bound.score, self.bound.lag)
        return numbers if self.value_mean is None else (*numbers, self.value_mean)

    def rank_value_means(self, heads: np.ndarray) -> list[np.ndarray] | None:
        """Per layer, mean values [heads of the rank, head_dim]; None where the profile has none.

        heads: as `ServingPlan.heads` has them.
        """
        if self.value_mean is None:
            return None
        return [means[own] for means, own in zip(self.value_mean, heads, strict=True)]


def head_weights(plan: ServingPlan, rank: int) -> np.ndarray:
    """float32 [layers, heads of the rank]: 1 / heads of the model, shared by the ranks that have the same head."""
    everywhere = np.concatenate([plan.heads(one) for one in range(plan.ranks)], axis=1)
    copies = (plan.heads(rank)[:, :, None] == everywhere[:, None]).sum(axis=2)
    return (1 / (copies * plan.geometry.num_heads)).astype(np.float32)


def asked_bound(launch: Launch) -> HistoryBound:
    """The bound that was asked for. Raises RaggedConfigError for numbers that do not go with it."""
    flags, segment = launch.options.of(HistoryFlags), launch.options.segment
    bound = history_bound(flags.history, flags.history_score or AUTO, segment)
    assert bound is not None, "it was asked for"
    chunk = launch.server_args.chunked_prefill_size
    most = bound.latest * segment
    if chunk is not None and not 0 < chunk <= most:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} does not go with --ragged-history {flags.history}: which segments "
            f"leave is known {most} tokens ahead, so chunks have at most as many; use {most}, or drop the flag"
        )
    return bound


def chunk_size(chunk: int, bound: HistoryBound, segment: int) -> int:
    """Tokens of a chunk of prefill: no more than it is known ahead what leaves.

    chunk: SGLang's default, whole segments, -1 for no chunks; or what the user gave, which is checked before.
    """
    most = bound.latest * segment
    return most if chunk <= 0 else min(chunk, most)


def with_lag(bound: HistoryBound, geometry: ModelGeometry, segment: int) -> HistoryBound:
    """The bound for a model that may have sliding-window layers: a page goes back once these have left it, too.

    Raises RaggedConfigError where SGLang is told to keep windows through prefill.
    """
    if geometry.windowed is None:
        return bound
    from sglang.srt.environ import envs

    from sgl_ragged.features.windows.window_needs import eviction_interval

    if not envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS.get():
        raise RaggedConfigError(
            "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS=0 keeps the windows of a whole prompt, and pages of "
            "--ragged-history go back when windows have left them; unset it, or drop --ragged-history"
        )
    return replace(bound, lag=window_pages(geometry.windowed.window, eviction_interval(), segment) - 1)


def settled(bound: HistoryBound, plan: ServingPlan, launch: Launch) -> HistoryPlan:
    """The bound with its score and lag. Raises RaggedConfigError for what it does not go with."""
    profile = None if launch.chosen is None else launch.chosen.profile
    value_mean = None if profile is None else profile.statistics.get(VALUE_MEAN)
    bound = with_lag(bound, plan.geometry, plan.segment)
    if bound.score == AUTO:
        bound = replace(bound, score=RECENCY if value_mean is None else NOVELTY)
        if bound.by_age:
            logger.warning(
                "--ragged-history: the oldest segment leaves, since there are no calibrated means of values to choose "
                "by; a profile that calib run makes has them"
            )
    if bound.score == NOVELTY and value_mean is None:
        raise RaggedConfigError(
            f"--ragged-history-score {NOVELTY} needs the means of values that calibration records, and the profile has "
            f"none: calibrate again (python -m calib run), or use --ragged-history-score {RECENCY}"
        )
    return HistoryPlan(bound, value_mean)

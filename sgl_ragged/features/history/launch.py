"""Bounded histories: the flags, the bound, the chunks of prefill, and what their scores need."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.history.bound import (
    AUTO,
    NOVELTY,
    RADIX_CACHE,
    RECENCY,
    HistoryBound,
    check_score,
    history_bound,
)
from sgl_ragged.features.history.history_plan import HistoryPlan
from sgl_ragged.features.windows.sizes import eviction_interval, window_pages
from sgl_ragged.launch.conflicts import MIXED
from sgl_ragged.launch.feature import Conflict, LaunchFeature
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import VALUE_MEAN

logger = logging.getLogger(__name__)

CASE = "--ragged-history"


@dataclass(frozen=True)
class HistoryFlags:
    """Values as given."""

    history: int | None = flag(
        None,
        "Tokens of its history that a request sees at most, a multiple of the segment; what leaves its view is freed "
        "while it runs.",
        shown="all",
        type=int,
        metavar="N",
    )
    history_score: str | None = flag(
        None,
        "With --ragged-history: by which score segments leave; auto: value_novelty with a calibrated profile, else "
        "recency.",
        shown="auto",
        check=check_score,
        metavar="NAME",
    )


class History(LaunchFeature):
    """Settings: the `HistoryBound` that was asked for, then `HistoryPlan`."""

    name = "history"
    case = CASE
    flags = HistoryFlags
    in_vain = "{flags} has no effect without --ragged-history: add --ragged-history, or remove it"
    contract = sglang.HISTORY
    needed_for = " with --ragged-history"
    radix_cache = RADIX_CACHE
    conflicts = (Conflict(CASE, MIXED, "it decodes within prefill, where histories do not look"),)

    def asked(self, start: Start) -> bool:
        return start.options.of(HistoryFlags).history is not None

    def settle(self, start: Start) -> HistoryBound:
        return asked_bound(start)

    def sglang_settings(self, settings: HistoryBound, start: ModelStart) -> dict[str, Any]:
        return {"chunked_prefill_size": chunk_size(start.view.chunked_prefill_size, settings, start.options.segment)}

    def join(self, settings: HistoryBound, plan: ServingPlan, start: BudgetedStart) -> HistoryPlan:
        return settled(settings, plan, start)

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {} if settings is None else {"most_request_bytes": settings.bound.request_bytes(sizes)}


def asked_bound(start: Start) -> HistoryBound:
    """Return the bound in the flags. Raises RaggedConfigError for numbers that do not go with it."""
    flags, segment = start.options.of(HistoryFlags), start.options.segment
    bound = history_bound(flags.history, flags.history_score or AUTO, segment)
    assert bound is not None, "it was asked for"
    chunk = start.server_args.chunked_prefill_size
    most = bound.latest * segment
    if chunk is not None and not 0 < chunk <= most:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} does not go with --ragged-history {flags.history}: which segments "
            f"leave is known {most} tokens ahead, so chunks have at most as many; use {most}, or drop the flag"
        )
    return bound


def chunk_size(chunk: int, bound: HistoryBound, segment: int) -> int:
    """Return the tokens of a chunk of prefill: at most as many as evictions are known ahead.

    chunk: SGLang's default, whole segments, -1 for no chunks; or what the user gave, which is checked before.
    """
    most = bound.latest * segment
    return most if chunk <= 0 else min(chunk, most)


def with_lag(bound: HistoryBound, geometry: ModelGeometry, segment: int) -> HistoryBound:
    """Return the bound with a lag for sliding-window layers: a page goes back once windows have left it, too.

    Raises RaggedConfigError where SGLang is told to keep windows through prefill.
    """
    if geometry.windowed is None:
        return bound
    from sglang.srt.environ import envs

    if not envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS.get():
        raise RaggedConfigError(
            "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS=0 keeps the windows of a whole prompt, and pages of "
            "--ragged-history go back when windows have left them; unset it, or drop --ragged-history"
        )
    return replace(bound, lag=window_pages(geometry.windowed.window, eviction_interval(), segment) - 1)


def settled(bound: HistoryBound, plan: ServingPlan, start: BudgetedStart) -> HistoryPlan:
    """Return the bound with its score and lag. Raises RaggedConfigError for conflicts with the profile or flags."""
    profile = start.chosen.profile
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


FEATURE = History()

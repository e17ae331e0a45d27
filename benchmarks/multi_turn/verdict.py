"""Which points are rejected: those whose traffic did not reach its targets; and which pools are not compared."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.multi_turn.driver import Run
from benchmarks.multi_turn.measures import figures, in_flight

SAME_BYTES = 0.1
"""Pools may differ by this share of their bytes: the ragged one is a whole number of slabs."""


def have_same_bytes(sizes: Iterable[int]) -> bool:
    """Whether pools may stand beside each other; 0 is not known, and left out."""
    known = [size for size in sizes if size]
    return not known or max(known) <= min(known) * (1 + SAME_BYTES)


@dataclass(frozen=True)
class Targets:
    """What the traffic of a point has to reach.

    Attributes:
        requests: how many answers there have to be.
        parallel: requests in flight at an unbounded request rate: as many as clients and --max-parallel allow.
        request_rate: requests per second; infinite: no rate.
        min_load: share of `parallel` or of the request rate that has to be reached.
        min_hit_rate: share of the reusable tokens that has to come from the cache.
    """

    requests: int
    parallel: float
    request_rate: float
    min_load: float
    min_hit_rate: float


def reason_to_reject(run: Run, targets: Targets) -> str | None:
    """Why the point does not count, in one line; None if it does."""
    if len(run.answers) < targets.requests:
        return f"{len(run.answers)} answers instead of {targets.requests}"
    if math.isfinite(targets.request_rate):
        if run.rate_share < targets.min_load:
            reached = run.rate_share * targets.request_rate
            return f"request rate {reached:.3g} per second instead of {targets.request_rate:.3g}: no client was free"
    elif targets.requests > targets.parallel:
        # Where there are more requests than are sent at once, others have to take the place of those that are done.
        parallel = in_flight(run.answers)
        if parallel < targets.min_load * targets.parallel:
            return f"{parallel:.1f} requests in flight on average instead of {targets.parallel:.1f}"
    hit_rate = figures(run.answers, run.samples).hit_rate
    # Where nothing can be reused, nothing is missed; a target of 0 requires nothing.
    if targets.min_hit_rate > 0 and not hit_rate >= targets.min_hit_rate:
        return f"hit rate {hit_rate:.2f} of the reusable tokens instead of at least {targets.min_hit_rate:.2f}"
    return None

"""Retrieval: the flags, and which heads watch for which in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.retrieval_plan import RetrievalPlan
from sgl_ragged.features.retrieval.roles import HeadRoles, head_roles, with_pivots
from sgl_ragged.features.retrieval.settings import RADIX_CACHE, Retrieval
from sgl_ragged.launch.conflicts import CODES, FITTED, FLASHINFER, MANY_RANKS, MIXED, NODES, SPLIT
from sgl_ragged.launch.feature import STAYS_UNFITTED, STAYS_WIDE, Conflict, LaunchFeature
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import BudgetChoice, Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes, parse_bytes
from sgl_ragged.profiles.profile import Profile, profile_kept

CASE = "--ragged-reservoir"

DEFAULTS: dict[str, Any] = {"overlay": 128, "pivots": 2, "watch_interval": 8, "drift": 0.5}
"""By field of `RetrievalFlags`."""


@dataclass(frozen=True)
class RetrievalFlags:
    """Values as given."""

    reservoir: int | None = flag(
        None,
        "Host memory of all ranks together, such as 8GiB, for what heads drop of segments: what attention comes back "
        "to is fetched from there.",
        shown="none, nothing is fetched",
        type=lambda text: parse_bytes(str(text)),
        metavar="N",
    )
    overlay: int | None = flag(
        None, "With --ragged-reservoir: tokens that a head can be given back at a time.", shown="128", type=int
    )
    pivots: int | None = flag(
        None,
        "With --ragged-reservoir: heads that keep everything and watch what attention comes back to.",
        shown="2",
        type=int,
    )
    watch_interval: int | None = flag(
        None, "With --ragged-reservoir: tokens between two looks at what pivots attend to.", shown="8", type=int
    )
    drift: float | None = flag(
        None,
        "With --ragged-reservoir: overlap with what was fetched last, below which is fetched anew.",
        shown="0.5",
        type=float,
    )


class Retrieving(LaunchFeature):
    """Settings: the `Retrieval` that was asked for; `RetrievalPlan` once budgets are chosen."""

    name = "retrieval"
    case = CASE
    flags = RetrievalFlags
    in_vain = "{flags} has no effect without --ragged-reservoir: add --ragged-reservoir, or remove it"
    contract = sglang.RETRIEVAL
    needed_for = " with --ragged-reservoir"
    radix_cache = RADIX_CACHE
    conflicts = (
        Conflict(CASE, "--ragged-history", "it frees segments that pivots must watch"),
        Conflict(CASE, "--enable-hierarchical-cache", "restored segments lack what heads dropped of them"),
        Conflict(CASE, NODES, "it has not been tested over nodes"),
        Conflict(CASE, MIXED, "it decodes within prefill, where pivots do not look"),
        Conflict(CASE, SPLIT, "it stores heads in parts, and pivots must be whole"),
        Conflict(CASE, FLASHINFER, "flashinfer plans without overlays", "use triton"),
        Conflict(CASE, "sliding-window layers", "their radix cache also shares pages of windows", "drop it"),
        Conflict(CASE, MANY_RANKS, "a rank would have only some of the queries of a pivot", "use as many as heads"),
        Conflict(CODES, CASE, "pivots of --ragged-reservoir read keys as numbers", "use wide", STAYS_WIDE),
        Conflict(FITTED, CASE, "what --ragged-reservoir gives back would count twice", "", STAYS_UNFITTED),
    )

    def asked(self, start: Start) -> bool:
        return start.options.of(RetrievalFlags).reservoir is not None

    def settle(self, start: Start) -> Retrieval:
        return asked_retrieval(start.options.of(RetrievalFlags))

    def budgets(self, settings: Retrieval, start: BudgetedStart, share: float) -> tuple[RetrievalPlan, np.ndarray]:
        roles, kept = choose_pivots(start.chosen, settings.pivots, share, start.options.segment)
        return RetrievalPlan(settings, roles), kept

    def join(self, settings: RetrievalPlan, plan: ServingPlan, start: BudgetedStart) -> RetrievalPlan:
        settings.entries(plan, start.kv_dtype.itemsize)
        return settings

    def layout_info(self, settings: RetrievalPlan | None, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        if settings is None:
            return {}
        return {
            "overlay_bytes": settings.row_bytes(rank),
            "reservoir_bytes": settings.asked.reservoir_bytes,
            "pivots": [list(pivot) for pivot in settings.roles.pivots],
        }


def asked_retrieval(flags: RetrievalFlags) -> Retrieval:
    """Return the settings in the flags. Raises RaggedConfigError for impossible numbers."""
    assert flags.reservoir is not None, "it was asked for"
    chosen = DEFAULTS | {name: getattr(flags, name) for name in DEFAULTS if getattr(flags, name) is not None}
    return Retrieval(
        reservoir_bytes=flags.reservoir,
        overlay=chosen["overlay"],
        pivots=chosen["pivots"],
        interval=chosen["watch_interval"],
        drift=chosen["drift"],
    )


def choose_pivots(chosen: BudgetChoice, count: int, ratio: float, segment: int) -> tuple[HeadRoles, np.ndarray]:
    """Return the first `count` pivots, and kept tokens like `BudgetChoice.kept` with room for them.

    Raises RaggedConfigError: there is no profile or no satellite, or as `head_roles` and `with_pivots` do.
    """
    found = _profile_with_roles(chosen)
    roles = head_roles(found, count)
    if not any(roles.satellites):
        raise RaggedConfigError(
            f"the {count} pivots of {found.model_id!r} foresee nothing that other heads drop: ask for more of them"
        )
    return roles, with_pivots(lambda share: profile_kept(found, share, segment), roles, ratio, segment)


def _profile_with_roles(chosen: BudgetChoice) -> Profile:
    if chosen.profile is None:
        raise RaggedConfigError(
            "--ragged-reservoir needs to know which heads watch for which, and equal budgets come without: calibrate "
            "(python -m calib run), or let --ragged-profile auto do it"
        )
    return chosen.profile


FEATURE = Retrieving()

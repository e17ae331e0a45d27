"""How features join a start: which it has, with which settings, and what the plan becomes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import Feature, Prefill, Rank, features, joined_features
from sgl_ragged.launch.flags import dashed, flags_of
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import Launch
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages


def refuse_in_vain(launch: Launch) -> None:
    """Raise RaggedConfigError for flags of a feature that a start does not have."""
    for feature in features():
        if feature.flags is None or feature.asked(launch):
            continue
        flags: Any = launch.options.of(feature.flags)
        given = [
            dashed(keyword)
            for keyword, one in flags_of(feature.flags).items()
            if getattr(flags, one.name) != one.default
        ]
        if given:
            raise RaggedConfigError(feature.in_vain.format(flags=", ".join(given)))


def settle_features(launch: Launch, known: Collection[Feature] = ()) -> dict[Feature, Any]:
    """Settings of the features that a start has, beside those that are known; raises RaggedConfigError."""
    found = {}
    for feature in features():
        if feature not in known and feature.asked(launch):
            feature.require()
            found[feature] = feature.settle(launch)
    trees = [feature for feature in (*known, *found) if feature.radix_cache is not None]
    if len(trees) > 1:
        raise RaggedConfigError(
            f"{trees[0].case} and {trees[1].case} both bring a radix cache, and a server has one; drop one of the two"
        )
    return found


def join_features(
    plan: ServingPlan,
    launch: Launch,
    joining: Mapping[Feature, Any],
    share: float,
    place: Callable[[ServingPlan], ServingPlan] = lambda plan: plan,
) -> ServingPlan:
    """The plan with heads placed and features joined, in their order.

    Args:
        launch: with the budgets that were chosen. joining: features and their settings.
        share: of the tokens that heads keep on average. place: places heads.
    """
    settings = dict(joining)
    for feature in features():
        if feature in settings:
            assert launch.chosen is not None, "budgets are chosen"
            settings[feature], kept = feature.budgets(settings[feature], launch, share)
            launch = replace(launch, chosen=replace(launch.chosen, kept=kept))
            plan = replace(plan, kept=kept)
    plan = place(plan)
    for feature in features():
        if feature in settings:
            plan = replace(
                plan, features=(*plan.features, feature.joined(feature.join(settings[feature], plan, launch)))
            )
    return plan


def side_pages(rank: Rank, prefill: Prefill) -> tuple[Feature | None, SidePages | None]:
    """The feature of a plan that needs pages beside slabs, and these; None where none does."""
    every = [(feature, feature.side_pages(settings, rank, prefill)) for feature, settings in joined_features(rank.plan)]
    needed = [(feature, pages) for feature, pages in every if pages is not None]
    if len(needed) > 1:
        raise RaggedConfigError(
            f"{needed[0][0].case} and {needed[1][0].case} both need pages beside slabs, and SGLang has one pool for "
            f"such; drop one of the two"
        )
    return needed[0] if needed else (None, None)


def describe_features(plan: ServingPlan, sizes: PoolSizes) -> list[str]:
    """Parts of the start-up line by features."""
    lines = [feature.describe(settings, sizes) for feature, settings in joined_features(plan)]
    return [line for line in lines if line is not None]


def page_bytes(rank: Rank) -> int:
    """Device bytes per page of the pool that features take."""
    return sum(feature.page_bytes(settings, rank) for feature, settings in joined_features(rank.plan))


def feature_bytes(rank: Rank) -> int:
    """Device bytes per request row that features take."""
    return sum(feature.row_bytes(settings, rank) for feature, settings in joined_features(rank.plan))

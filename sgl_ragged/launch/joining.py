"""How features join a start: which it has, with which settings, and what the plan becomes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sgl_ragged.contract_checks import check_contract
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import LaunchFeature, launch_features
from sgl_ragged.launch.flags import dashed, flags_of
from sgl_ragged.launch.plan import Joined, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, Start


def refuse_flags_without_effect(start: Start) -> None:
    """Raise RaggedConfigError for flags of a feature that a start does not have."""
    for feature in launch_features():
        if feature.flags is None or feature.asked(start):
            continue
        flags: Any = start.options.of(feature.flags)
        given = [
            dashed(keyword)
            for keyword, one in flags_of(feature.flags).items()
            if getattr(flags, one.name) != one.default
        ]
        if given:
            raise RaggedConfigError(feature.in_vain.format(flags=", ".join(given)))


def settle_features(start: Start, known: Collection[LaunchFeature] = ()) -> dict[LaunchFeature, Any]:
    """Return first settings of the features that a start has, except those in `known`; raises RaggedConfigError."""
    found = {}
    for feature in launch_features():
        if feature not in known and feature.asked(start):
            check_contract(feature.contract, feature.needed_for)
            found[feature] = feature.settle(start)
    trees = [feature for feature in (*known, *found) if feature.radix_cache is not None]
    if len(trees) > 1:
        raise RaggedConfigError(
            f"{trees[0].case} and {trees[1].case} both bring a radix cache, and a server has one; drop one of the two"
        )
    return found


def join_features(
    plan: ServingPlan,
    start: BudgetedStart,
    joining: Mapping[LaunchFeature, Any],
    share: float,
    place: Callable[[ServingPlan], ServingPlan] = lambda plan: plan,
) -> ServingPlan:
    """Return the plan with heads placed and features joined, in their order.

    Args:
        joining: features and their first settings.
        share: of the tokens that heads keep on average.
        place: places heads.
    """
    settings = dict(joining)
    for feature in launch_features():
        if feature in settings:
            settings[feature], kept = feature.budgets(settings[feature], start, share)
            start = replace(start, chosen=replace(start.chosen, kept=kept))
            plan = replace(plan, kept=kept)
    plan = place(plan)
    for feature in launch_features():
        if feature in settings:
            joined = Joined(feature.name, feature.join(settings[feature], plan, start))
            plan = replace(plan, features=(*plan.features, joined))
    return plan

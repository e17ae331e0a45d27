"""A feature's half in the launcher: its flags, its conflicts, its budgets, and the settings that workers follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sgl_ragged.features import load_halves
from sgl_ragged.launch.plan import FeatureSettings, Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.sglang_contract import CONTROLLER, SERVING, START_CHECK, Functions

EVERY_SERVER = "every server"
"""Name of the part that needs the functions of `SERVING`."""

REFUSED = "the server does not start"
STAYS_WIDE = "`auto` stays `wide`; a format that was asked for is refused"
STAYS_UNFITTED = "served unfitted, and the log says why"
UNCHECKED = "answers are not checked at the start, and the log says why"


@dataclass(frozen=True)
class Conflict:
    """Two things that a start cannot have together.

    one, other: cases (`conflicts.cases`); the first may be `conflicts.CODES`, `conflicts.FITTED` or
    `conflicts.CHECKED`. why: one clause. advice: what to do instead. effect: one of REFUSED, STAYS_WIDE,
    STAYS_UNFITTED, UNCHECKED.
    """

    one: str
    other: str
    why: str
    advice: str = "drop one of the two"
    effect: str = REFUSED


class LaunchFeature:
    """A part of a server beyond slabs and tails. Every method has a default that does nothing.

    name: in plans and in /server_info; the feature's half in workers has the same. case: in the table of conflicts.
    flags: dataclass of `flags.flag`s; without the feature they have no effect, and `in_vain` is the refusal.
    contract: functions of SGLang that it needs. needed_for: words for them, such as " with --flag".
    radix_cache: name under which its half in workers registers a radix cache, or None.
    cases: further cases of the table of conflicts, seen in flags.
    """

    name: ClassVar[str]
    case: ClassVar[str]
    flags: ClassVar[type | None] = None
    in_vain: ClassVar[str] = "{flags} has no effect: drop it"
    contract: ClassVar[Functions] = {}
    needed_for: ClassVar[str] = ""
    radix_cache: ClassVar[str | None] = None
    cases: ClassVar[Mapping[str, Callable[[Start], bool]]] = {}
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    def asked(self, start: Start) -> bool:
        """True if the flags ask for it or, once `start` is a ModelStart, the model does."""
        return False

    def settle(self, start: Start) -> Any:
        """Return first settings of a start that has it. Raises RaggedConfigError for what cannot be honoured."""
        return None

    def sglang_settings(self, settings: Any, start: ModelStart) -> dict[str, Any]:
        """Settings of SGLang that change with it, once SGLang has resolved its own."""
        return {}

    def budgets(self, settings: Any, start: BudgetedStart, share: float) -> tuple[Any, np.ndarray]:
        """Return settings and kept tokens, int64 [layers, heads], once budgets are chosen.

        Args:
            share: of the tokens that heads keep on average.
        """
        return settings, start.chosen.kept

    def join(self, settings: Any, plan: ServingPlan, start: BudgetedStart) -> FeatureSettings:
        """Return the workers' settings, once heads are placed and the features before it have joined."""
        return FeatureSettings()

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        """Its part of `sgl-ragged layout --json`; settings is None where it has not joined."""
        return {}


def launch_features() -> tuple[LaunchFeature, ...]:
    """Return all features, in the order in which they join. Raises RaggedConfigError as `load_halves` does."""
    return load_halves("launch")


def contracts() -> dict[str, Functions]:
    """Return the functions of SGLang that the plugin needs, by the words for what needs them."""
    groups = {EVERY_SERVER: SERVING, "--ragged-check": START_CHECK, "--dp-size": CONTROLLER}
    return groups | {feature.case: feature.contract for feature in launch_features() if feature.contract}

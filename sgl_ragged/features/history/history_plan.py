"""Settings of bounded histories that workers follow: the bound, and mean values for its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.launch.plan import FeatureSettings, ServingPlan
from sgl_ragged.mem_pool.sizing import PoolSizes


@dataclass(frozen=True, eq=False)
class HistoryPlan(FeatureSettings):
    """Settings of bounded histories.

    bound: bound of each request's history.
    value_mean: float32 [layers, heads, head_dim], mean values of the model's heads; None if the profile has none.
    """

    bound: HistoryBound
    value_mean: np.ndarray | None

    @property
    def state(self) -> tuple[Any, ...]:
        numbers = (self.bound.limit, self.bound.score, self.bound.lag)
        return numbers if self.value_mean is None else (*numbers, self.value_mean)

    def describe(self, sizes: PoolSizes) -> str:
        return f"{self.bound.describe(sizes)}; segments leave by {self.bound.score}"

    def rank_value_means(self, heads: np.ndarray) -> list[np.ndarray] | None:
        """Return mean values per layer, [heads of the rank, head_dim]; None if the profile has none.

        heads: as `ServingPlan.heads` has them.
        """
        if self.value_mean is None:
            return None
        return [means[own] for means, own in zip(self.value_mean, heads, strict=True)]


def head_weights(plan: ServingPlan, rank: int) -> np.ndarray:
    """Return float32 [layers, heads of the rank]: 1 / heads of the model, shared by ranks with the same head."""
    everywhere = np.concatenate([plan.heads(one) for one in range(plan.ranks)], axis=1)
    copies = (plan.heads(rank)[:, :, None] == everywhere[:, None]).sum(axis=2)
    return (1 / (copies * plan.geometry.num_heads)).astype(np.float32)

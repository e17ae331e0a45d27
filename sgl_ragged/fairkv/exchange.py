"""Heads that are split over ranks: attention over whole heads from each rank's attention over its part.

Attention over all entries of a head is the sum of the parts' outputs, each times exp(its log-sum-exp - that of all
parts). Ranks add up their outputs behind o anyway. So they exchange the log-sum-exps, one number per token and query
head, and each multiplies its own part by its weight. Torch, without SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl_ragged.fairkv.placement import Placement


@dataclass(frozen=True)
class _Layer:
    """One layer, seen from one rank.

    places: int64 [parts], this rank's places that hold a part of a head.
    width: most parts on any rank.
    same: bool [parts, ranks * width], which of all ranks' parts belong to the same head.
    """

    places: torch.Tensor
    width: int
    same: torch.Tensor


class LseExchange:
    """Multiplies outputs of split heads by weights. All ranks must call it for the same layers, in the same order.

    Args:
        gather: from float32 [tokens, width, q_per_kv] of each rank to [ranks * tokens, width, q_per_kv], in rank order.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        device: str | torch.device,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._ranks, self._gather = placement.ranks, gather
        self._layers: list[_Layer | None] = [
            _layer(*layer, rank, device) for layer in zip(placement.heads, placement.partial, strict=True)
        ]

    def needed(self, layer: int) -> bool:
        """True where a rank holds a part of a head in this layer."""
        return self._layers[layer] is not None

    def describe(self, batch: Any) -> None:
        """Nothing changes from batch to batch (`attention.epilogue.Epilogue`)."""

    def apply(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        return self.weigh(layer, output, lse)

    def weigh(self, layer: int, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Multiply the outputs of parts by their weights.

        Args:
            output: [tokens, places, q_per_kv, head_dim]; of places that attend to nothing, anything. Changed in place.
            lse: float32 [tokens, places, q_per_kv], natural log-sum-exps of the parts; others are not read.

        Returns:
            `output`.
        """
        info = self._layers[layer]
        assert info is not None, "no rank holds a part of a head in this layer"
        own = lse.index_select(1, info.places)
        sent = lse.new_full((lse.shape[0], info.width, lse.shape[2]), -torch.inf)
        sent[:, : own.shape[1]] = own
        # [ranks * tokens, width, q_per_kv] -> [tokens, 1, q_per_kv, ranks * width]
        every = self._gather(sent).unflatten(0, (self._ranks, -1)).permute(1, 3, 0, 2).flatten(2)[:, None]
        total = every.masked_fill(~info.same[:, None], -torch.inf).logsumexp(dim=-1)
        # A part without entries has weight 0, whatever its output holds: (-inf) - (-inf) and 0 * NaN would be NaN.
        weights = (own - total.masked_fill(total == -torch.inf, 0.0)).exp()[..., None]
        parts = output.index_select(1, info.places).float()
        output[:, info.places] = torch.where(weights > 0, parts * weights, 0.0).to(output.dtype)
        return output


def _layer(heads: np.ndarray, partial: np.ndarray, rank: int, device: str | torch.device) -> _Layer | None:
    """`heads` int64 and `partial` bool [ranks, places] of one layer; None where no head is split."""
    if not partial.any():
        return None
    width = int(partial.sum(axis=1).max())
    numbers = np.full((len(heads), width), -1)
    for row, held, part in zip(numbers, heads, partial, strict=True):
        row[: part.sum()] = held[part]
    places = np.flatnonzero(partial[rank])
    same = heads[rank, places][:, None] == numbers.reshape(1, -1)
    return _Layer(torch.from_numpy(places).to(device), width, torch.from_numpy(same).to(device))

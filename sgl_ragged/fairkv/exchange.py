"""Attention over heads that are split over ranks, from each rank's attention over its part.

Attention over all entries of a head is the sum of the parts' outputs, each multiplied by exp(its log-sum-exp - that of
all parts). The all-reduce after o sums the outputs. So ranks exchange only the log-sum-exps, one number per token and
query head, and each rank multiplies its own part by its weight. Torch, without SGLang.
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
    """Split heads of one layer on one rank.

    Args:
        places: int64 [parts], this rank's places that hold a part of a head.
        width: largest number of parts on any rank.
        same: bool [parts, ranks * width], whether a part of any rank belongs to the same head.
    """

    places: torch.Tensor
    width: int
    same: torch.Tensor


class LseExchange:
    """Weighs outputs of split heads. All ranks must call it for the same layers, in the same order.

    Args:
        gather: all-gather from float32 [tokens, width, q_per_kv] of each rank to [ranks * tokens, width, q_per_kv], in
            rank order.
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
            _split_layer(*layer, rank, device) for layer in zip(placement.heads, placement.partial, strict=True)
        ]

    def needed(self, layer: int) -> bool:
        """Return whether any rank holds a part of a head in this layer."""
        return self._layers[layer] is not None

    def describe(self, batch: Any) -> None:
        """Do nothing: the exchange is the same for all batches (`attention.epilogue.Epilogue`)."""

    def apply(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        return self.weigh(layer, output, lse)

    def weigh(self, layer: int, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Multiply the outputs of parts by their weights.

        Args:
            output: [tokens, places, q_per_kv, head_dim], changed in place; may hold anything at places that attend to
                no token.
            lse: float32 [tokens, places, q_per_kv], natural log-sum-exps; only entries of parts are read.

        Returns:
            `output`.
        """
        split = self._layers[layer]
        assert split is not None, "no rank holds a part of a head in this layer"
        own_lse = lse.index_select(1, split.places)
        sent = lse.new_full((lse.shape[0], split.width, lse.shape[2]), -torch.inf)
        sent[:, : own_lse.shape[1]] = own_lse
        # [ranks * tokens, width, q_per_kv] -> [tokens, 1, q_per_kv, ranks * width]
        all_lse = self._gather(sent).unflatten(0, (self._ranks, -1)).permute(1, 3, 0, 2).flatten(2)[:, None]
        total_lse = all_lse.masked_fill(~split.same[:, None], -torch.inf).logsumexp(dim=-1)
        # A part without entries must get weight 0 for any output: (-inf) - (-inf) and 0 * NaN would be NaN.
        weights = (own_lse - total_lse.masked_fill(total_lse == -torch.inf, 0.0)).exp()[..., None]
        parts = output.index_select(1, split.places).float()
        output[:, split.places] = torch.where(weights > 0, parts * weights, 0.0).to(output.dtype)
        return output


def _split_layer(heads: np.ndarray, partial: np.ndarray, rank: int, device: str | torch.device) -> _Layer | None:
    """Find the split heads of one layer; None if no head is split.

    Args:
        heads, partial: int64 and bool [ranks, places], the placement's heads and whether the place holds a part.
    """
    if not partial.any():
        return None
    width = int(partial.sum(axis=1).max())
    part_heads = np.full((len(heads), width), -1)
    for row, rank_heads, is_part in zip(part_heads, heads, partial, strict=True):
        row[: is_part.sum()] = rank_heads[is_part]
    places = np.flatnonzero(partial[rank])
    same = heads[rank, places][:, None] == part_heads.reshape(1, -1)
    return _Layer(torch.from_numpy(places).to(device), width, torch.from_numpy(same).to(device))

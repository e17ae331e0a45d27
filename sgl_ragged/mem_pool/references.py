"""A codebook on the device, as fitting uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sgl_ragged.codebook import MASSES, OUTPUTS, QUERIES, ROPE

BIAS_RIDGE = 1e-3
"""Of the direction in which keys carry a bias, per query."""


@dataclass(frozen=True)
class References:
    """The codebook of one layer's heads on the device; H heads, m queries, d dimensions.

    queries: float16 [H, m, d], times what logits are scaled by, dimensions in `order`. masses: float32 [H, 2, m].
    outputs: float16 [H, 2, m, d].
    bias: float32 [H, d], u: its product with every query is 1, as nearly as one vector can be, so that a key that is
    longer by b u has logits larger by b. Dimensions in `order`.
    frequencies: float64 [r / 2]. order, inverse: int64 [d], or None where dimensions stay in their places.
    """

    queries: torch.Tensor
    masses: torch.Tensor
    outputs: torch.Tensor
    bias: torch.Tensor
    frequencies: torch.Tensor
    order: torch.Tensor | None
    inverse: torch.Tensor | None

    @classmethod
    def of(cls, statistics: Mapping[str, torch.Tensor], scale: float) -> References:
        """From one layer's statistics [H, ...]; `scale`: what attention multiplies logits by."""
        queries = (statistics[QUERIES].float() * scale).half()
        frequencies, order = statistics[ROPE[0]][0].double(), statistics[ROPE[1]][0].long()
        moved = bool((order.cpu() != torch.arange(len(order))).any())
        return cls(
            queries=queries,
            masses=statistics[MASSES].float(),
            outputs=statistics[OUTPUTS].half(),
            bias=_bias(queries.float()),
            frequencies=frequencies,
            order=order if moved else None,
            inverse=order.argsort() if moved else None,
        )

    def heads(self, heads: torch.Tensor) -> References:
        """Those of some heads, int64 [heads]."""
        of_heads = {name: getattr(self, name)[heads] for name in ("queries", "masses", "outputs", "bias")}
        return replace(self, **of_heads)


def _bias(queries: torch.Tensor) -> torch.Tensor:
    """Ridge regression of 1 on the queries [H, m, d]: [H, d]."""
    count, dim = queries.shape[1:]
    gram = queries.transpose(1, 2) @ queries + BIAS_RIDGE * count * torch.eye(dim, device=queries.device)
    return torch.linalg.solve(gram, queries.sum(dim=1))

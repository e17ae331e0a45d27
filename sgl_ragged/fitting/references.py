"""A codebook on the device, as fitting uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE

BIAS_RIDGE = 1e-3
"""Of the direction in which keys carry a bias, per query."""


@dataclass(frozen=True)
class References:
    """The codebook of one layer's heads on the device; H heads, m queries, d dimensions.

    queries: float16 [H, d, m], on CPUs the same numbers in float32, times what logits are scaled by, dimensions in
    `order`. outputs: alike, [H, 2, d, m], dimensions in their places. masses: float32 [H, 2, m].
    bias: float32 [H, d], u: its product with every query is 1, as nearly as one vector can be, so that a key that is
    longer by b u has logits larger by b. Dimensions in `order`.
    frequencies: float64 [r / 2]. inverse: int64 [d], where dimensions come from that are not in `order`; or None where
    they are in their places.
    """

    queries: torch.Tensor
    masses: torch.Tensor
    outputs: torch.Tensor
    bias: torch.Tensor
    frequencies: torch.Tensor
    inverse: torch.Tensor | None

    @classmethod
    def of(cls, statistics: Mapping[str, torch.Tensor], scale: float) -> References:
        """From one layer's statistics [H, ...]; `scale`: what attention multiplies logits by."""
        queries, outputs = (statistics[QUERIES].float() * scale).half(), statistics[OUTPUTS].half()
        queries, outputs = (x.transpose(-1, -2).contiguous() for x in (queries, outputs))
        frequencies, order = statistics[ROPE[0]][0].double(), statistics[ROPE[1]][0].long()
        moved = bool((order.cpu() != torch.arange(len(order))).any())
        if not queries.is_cuda:
            # There is room, and no kernel that multiplies them as they are.
            queries, outputs = queries.float(), outputs.float()
        return cls(
            queries=queries,
            masses=statistics[MASSES].float(),
            outputs=outputs,
            bias=_bias(queries.float()),
            frequencies=frequencies,
            inverse=order.argsort() if moved else None,
        )

    def seen_from(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [segments, H, d, m] and bias [segments, H, d, 1] turned by RoPE to positions, integers [segments].

        float32, dimensions in their places.
        """
        # Angles of far positions in float32 would be off by more than the fastest frequencies bear.
        angles = positions[:, None, None, None].double() * self.frequencies[:, None]
        cosines, sines = angles.cos().float(), angles.sin().float()
        turned = (_turned(x.float(), cosines, sines) for x in (self.queries, self.bias[..., None]))
        queries, bias = (x if self.inverse is None else x.index_select(2, self.inverse) for x in turned)
        return queries, bias

    def heads(self, heads: torch.Tensor) -> References:
        """Those of some heads, int64 [heads]."""
        of_heads = {name: getattr(self, name)[heads] for name in ("queries", "masses", "outputs", "bias")}
        return replace(self, **of_heads)


def _turned(columns: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Columns [H, d, n], of which cosines and sines [segments, 1, r / 2, 1] turn the first r dimensions."""
    half = cosines.shape[2]
    first, second, rest = columns.split([half, half, columns.shape[1] - 2 * half], dim=1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*turned, rest.expand(len(cosines), *rest.shape)], dim=2)


def _bias(queries: torch.Tensor) -> torch.Tensor:
    """Ridge regression of 1 on the queries [H, d, m]: [H, d]."""
    dim, count = queries.shape[1:]
    gram = queries @ queries.transpose(1, 2) + BIAS_RIDGE * count * torch.eye(dim, device=queries.device)
    return torch.linalg.solve(gram, queries.sum(dim=2))

"""A codebook on the device, as fitting uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE

ALIGNED = 16
"""Queries on CPUs: multiples of as many, where products of matrices take a tenth less."""

BIAS_RIDGE = 1e-3
"""Of the direction in which keys carry a bias, per query."""


HEAD_AXES = dict(queries=0, across=0, masses=1, outputs=1, bias=0, bias_across=0, frequencies=0)
"""Which axes of `References` are those of heads."""


@dataclass(frozen=True)
class References:
    """The codebook of heads on the device, of one layer or of several.

    H heads, d dimensions in their places, m queries, of which `count` are the codebook's: any others attend to nothing
    here, and want nothing.

    queries: float16 [H, d, m], on CPUs the same numbers in float32, times what logits are scaled by. across: alike,
    what sines are multiplied by where RoPE turns them. outputs: alike, [2, H, d, m]. masses: float32 [2, H, 1, m].
    bias: float32 [H, 1, d], u: its product with every query is 1, as nearly as one vector can be, so that a key that is
    longer by b u has logits larger by b. bias_across: as of queries.
    frequencies: float64 [H, d], 0 where nothing is turned.
    """

    queries: torch.Tensor
    across: torch.Tensor
    masses: torch.Tensor
    outputs: torch.Tensor
    bias: torch.Tensor
    bias_across: torch.Tensor
    frequencies: torch.Tensor
    count: int

    @classmethod
    def of(cls, statistics: Mapping[str, torch.Tensor], scale: float) -> References:
        """From one layer's statistics [H, ...]; `scale`: what attention multiplies logits by."""
        queries, outputs = (statistics[QUERIES].float() * scale).half(), statistics[OUTPUTS].half()
        frequencies, order = statistics[ROPE[0]][0].double(), statistics[ROPE[1]][0].long()
        inverse, half = order.argsort(), len(frequencies)

        def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """[H, n, d] with pairs in front, and what sines turn: [H, n, d], in their places."""
            first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
            return x[..., inverse], torch.cat([-second, first, torch.zeros_like(rest)], dim=-1)[..., inverse]

        bias, bias_across = both(_bias(queries.float())[:, None])
        columns = [x.transpose(-1, -2) for x in (*both(queries), outputs.transpose(0, 1))]
        masses, count = statistics[MASSES].float().transpose(0, 1)[:, :, None], queries.shape[1]
        if not queries.is_cuda:
            # There is room, and no kernel that multiplies them as they are.
            columns = [pad(x.float(), (0, -count % ALIGNED)) for x in columns]
            masses = pad(masses, (0, -count % ALIGNED), value=math.inf)
        queries, across, outputs = (x.contiguous() for x in columns)
        every = torch.cat([frequencies, frequencies, frequencies.new_zeros(len(order) - 2 * half)])[inverse]
        every = every.expand(len(queries), -1)
        return cls(queries, across, masses.contiguous(), outputs, bias, bias_across, every, count)

    @classmethod
    def joined(cls, parts: Sequence[References]) -> References:
        """Those of several layers' heads, one behind the other."""
        (count,) = {part.count for part in parts}
        together = {
            name: torch.cat([getattr(part, name) for part in parts], dim=axis) for name, axis in HEAD_AXES.items()
        }
        return cls(**together, count=count)

    def seen_from(self, positions: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries [segments, H, d, m] and bias [segments, H, 1, d] turned by RoPE to positions, integers [segments];
        masses [segments, H, 1, m] and outputs [segments, H, d, m] of all else that the queries saw.

        float32. first: bool [segments], which are the first of their sequences.
        """
        # Angles of far positions in float32 would be off by more than the fastest frequencies bear.
        angles = positions[:, None, None].double() * self.frequencies
        cosines, sines = (x.float()[:, :, None] for x in (angles.cos(), angles.sin()))
        bias = torch.addcmul(self.bias * cosines, self.bias_across, sines)
        columns = cosines.transpose(2, 3), sines.transpose(2, 3)
        queries = torch.addcmul(self.queries.float() * columns[0], self.across.float(), columns[1])
        version = first.long()
        masses, outputs = (x.index_select(0, version) for x in (self.masses, self.outputs))
        return queries, bias, masses, outputs.float()

    def heads(self, heads: torch.Tensor | slice) -> References:
        """Those of some heads, int64 [heads]; views for a slice."""
        return replace(
            self,
            **{
                name: getattr(self, name)[heads] if axis == 0 else getattr(self, name)[:, heads]
                for name, axis in HEAD_AXES.items()
            },
        )


def _bias(queries: torch.Tensor) -> torch.Tensor:
    """Ridge regression of 1 on the queries [H, m, d]: float32 [H, d].

    In float64, since queries resemble each other: in float32 the solution would depend on the order of sums.
    """
    count, dim = queries.shape[1:]
    queries = queries.double()
    gram = queries.transpose(1, 2) @ queries + BIAS_RIDGE * count * torch.eye(
        dim, dtype=torch.float64, device=queries.device
    )
    return torch.linalg.solve(gram, queries.sum(dim=1)).float()

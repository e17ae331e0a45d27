"""The codebook of queries on the device, prepared for fitting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE

ALIGNED = 16
"""On CPUs, queries are padded to a multiple of ALIGNED, with which products of matrices take a tenth less time."""

BIAS_RIDGE = 1e-3
"""Ridge per query in the regression for the direction in which keys carry a bias."""


HEAD_AXES = dict(queries=0, across=0, masses=1, outputs=1, bias=0, bias_across=0, frequencies=0)
"""Axis of heads in each tensor of `References`."""


@dataclass(frozen=True)
class References:
    """The codebook of H heads on the device, for one layer or several; d dimensions in the model's order, m queries.

    Queries after the first `count` are padding: they attend to nothing in the segment and have no error.

    Args:
        queries: [H, d, m], multiplied by the scale of logits; float16, on CPUs float32.
        across: like `queries`, the factors of sines in a rotation by RoPE.
        masses: float32 [2, H, 1, m], log-mass of the keys that each query saw; then without the first segment.
        outputs: [2, H, d, m], attention outputs over these keys; float16, on CPUs float32.
        bias: float32 [H, 1, d], direction u whose product with every query is nearly 1, so that adding b u to a key
            adds b to its logits.
        bias_across: like `bias`, the factors of sines.
        frequencies: float64 [H, d], radians per position; 0 for dimensions that are not rotated.
        count: number of the codebook's queries.
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
    def from_statistics(cls, statistics: Mapping[str, torch.Tensor], scale: float) -> References:
        """Prepare the codebook of one layer.

        Args:
            statistics: CODEBOOK and ROPE of the layer, [H, ...].
            scale: factor by which attention multiplies logits.
        """
        queries, outputs = (statistics[QUERIES].float() * scale).half(), statistics[OUTPUTS].half()
        frequencies, order = statistics[ROPE[0]][0].double(), statistics[ROPE[1]][0].long()
        inverse, half = order.argsort(), len(frequencies)

        def with_across(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Return [H, n, d] in the model's order of dimensions, and the factors of sines in its rotation."""
            first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
            return x[..., inverse], torch.cat([-second, first, torch.zeros_like(rest)], dim=-1)[..., inverse]

        bias, bias_across = with_across(_bias_direction(queries.float())[:, None])
        columns = [x.transpose(-1, -2) for x in (*with_across(queries), outputs.transpose(0, 1))]
        masses, count = statistics[MASSES].float().transpose(0, 1)[:, :, None], queries.shape[1]
        if not queries.is_cuda:
            # torch has no kernel for CPUs that multiplies float16 matrices fast.
            columns = [pad(x.float(), (0, -count % ALIGNED)) for x in columns]
            masses = pad(masses, (0, -count % ALIGNED), value=math.inf)
        queries, across, outputs = (x.contiguous() for x in columns)
        all_frequencies = torch.cat([frequencies, frequencies, frequencies.new_zeros(len(order) - 2 * half)])[inverse]
        all_frequencies = all_frequencies.expand(len(queries), -1)
        return cls(queries, across, masses.contiguous(), outputs, bias, bias_across, all_frequencies, count)

    @classmethod
    def concatenate(cls, layers: Sequence[References]) -> References:
        """Concatenate the heads of several layers."""
        (count,) = {layer.count for layer in layers}
        tensors = {
            name: torch.cat([getattr(layer, name) for layer in layers], dim=axis) for name, axis in HEAD_AXES.items()
        }
        return cls(**tensors, count=count)

    def seen_from(self, positions: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotate the queries as if they looked back from the given positions.

        Args:
            positions: integers [segments], positions of the segments' last tokens.
            first: bool [segments], whether a segment is the first of its sequence.

        Returns:
            Float32 tensors: queries [segments, H, d, m] and bias [segments, H, 1, d], rotated; masses
            [segments, H, 1, m] and outputs [segments, H, d, m] of all other keys that the queries saw.
        """
        # In float32, errors of the angles at far positions would be too large for the fastest frequencies.
        angles = positions[:, None, None].double() * self.frequencies
        cosines, sines = (x.float()[:, :, None] for x in (angles.cos(), angles.sin()))
        bias = torch.addcmul(self.bias * cosines, self.bias_across, sines)
        columns = cosines.transpose(2, 3), sines.transpose(2, 3)
        queries = torch.addcmul(self.queries.float() * columns[0], self.across.float(), columns[1])
        version = first.long()
        masses, outputs = (x.index_select(0, version) for x in (self.masses, self.outputs))
        return queries, bias, masses, outputs.float()

    def heads(self, heads: torch.Tensor | slice) -> References:
        """Select heads, int64 [heads] or a slice, for which the tensors are views."""
        return replace(
            self,
            **{
                name: getattr(self, name)[heads] if axis == 0 else getattr(self, name)[:, heads]
                for name, axis in HEAD_AXES.items()
            },
        )


def _bias_direction(queries: torch.Tensor) -> torch.Tensor:
    """Compute the ridge regression of 1 on the queries [H, m, d]: float32 [H, d].

    Float64 is needed because queries are similar to each other: in float32 the solution would depend on the order of
    sums.
    """
    count, dim = queries.shape[1:]
    queries = queries.double()
    gram = queries.transpose(1, 2) @ queries + BIAS_RIDGE * count * torch.eye(
        dim, dtype=torch.float64, device=queries.device
    )
    return torch.linalg.solve(gram, queries.sum(dim=1)).float()

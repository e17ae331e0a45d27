"""Expected attention: keep the tokens that queries after the segment are expected to attend to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from sgl_ragged.profiles.budgets import SINKS
from sgl_ragged.scorers.base import Scorer, SegmentData


class ExpectedAttention(Scorer):
    """Scores a token by its expected attention weight under Gaussian queries, times the norm of its value.

    With queries ~ N(mean, covariance) and c = scale, E[exp(c q.k)] = exp(c mean.k + c^2 k'covariance k / 2),
    normalised over the segment without the sinks, which are always kept; mean over the group's query heads.

    The queries are those of the positions after the segment. Calibration measures their moments before RoPE and
    averages the rotations over the next positions (`calib.query_moments`), relative to the segment's end. So keys are
    rotated back by that position here, with the model's rotary frequencies: `rope_frequencies` [1, r / 2] in radians
    per position; `rope_order` [1, d], dimensions: first elements of the rotated pairs, then second elements, then the
    rest.

    Source: Devoto, Jeblick, Jegou, "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution" (2025). There the moments come from the prompt, here from the profile.
    """

    name = "expected_attention"
    statistics = ("query_mean", "query_covariance", "rope_frequencies", "rope_order")
    shared_statistics = ("rope_frequencies", "rope_order")
    axes = MappingProxyType(
        {
            "query_mean": ("q_per_kv", "head_dim"),
            "query_covariance": ("q_per_kv", "head_dim", "head_dim"),
            "rope_frequencies": ("rotated pairs",),
            "rope_order": ("head_dim",),
        }
    )
    counts_positions = True

    def refuse_statistics(self, statistics: Mapping[str, torch.Tensor]) -> str | None:
        order, pairs = statistics["rope_order"].float(), statistics["rope_frequencies"].shape[-1]
        if (order.sort(dim=-1).values != torch.arange(order.shape[-1])).any():
            return "rope_order must hold every dimension of a head once"
        if 2 * pairs > order.shape[-1]:
            return f"rope_frequencies rotates {pairs} pairs, too many for {order.shape[-1]} dimensions"
        return None

    def score(self, segment: SegmentData) -> torch.Tensor:
        assert segment.segment_indices is not None, "sealing passes the segments' numbers"
        length = segment.keys.shape[2]
        mean, covariance = segment.statistics["query_mean"].float(), segment.statistics["query_covariance"].float()
        keys = segment.keys.float()[..., segment.statistics["rope_order"][0].long()]
        ends = (segment.segment_indices + 1) * length
        keys = rotate(keys, -ends[:, None, None], segment.statistics["rope_frequencies"][0])[:, :, None]
        linear = (keys @ mean[..., None])[..., 0]
        quadratic = ((keys @ covariance) * keys).sum(dim=-1)
        logits = segment.scale * linear + segment.scale**2 / 2 * quadratic
        sinks = (segment.segment_indices == 0)[:, None] & (torch.arange(length, device=keys.device) < SINKS)
        weights = logits.masked_fill(sinks[:, None, None], -torch.inf).softmax(dim=-1).mean(dim=2)
        return weights * segment.values.float().norm(dim=-1)


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate rows as RoPE does.

    Args:
        rows: [..., d]; the first r / 2 dimensions are the first elements of pairs, the next r / 2 the second elements.
        positions: [...], broadcastable; may be negative.
        frequencies: [r / 2], radians per position.
    """
    half = frequencies.shape[0]
    # In float32, errors of the angles at far positions would be too large for the fastest frequencies.
    angles = positions[..., None].double() * frequencies.double()
    cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
    first, second, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

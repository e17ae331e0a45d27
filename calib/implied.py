"""Implied budgets: what each head gets when heads compete by score (TANGRAM section 2.1)."""

from __future__ import annotations

import math

import torch

from sgl_ragged.scorers import forced_first


def implied_counts(scores: torch.Tensor, ratio: float, scope: str) -> torch.Tensor:
    """Tokens that each head gets from the non-uniform top-k: TANGRAM Eq. 3, the best ceil(ratio * H * S) per segment.

    Sinks and guard come first, as when serving; NaN scores last; ties go to the earlier head, then token.

    Args:
        scores: float [segments, layers, heads, S]; segment 0 starts the sequence.
        ratio: in (0, 1].
        scope: "layer" competes over the heads of a layer, "model" over all heads.

    Returns:
        int32 [segments, layers, heads].
    """
    segments, layers, heads, length = scores.shape
    ranks = forced_first(scores.flatten(1, 2), torch.arange(segments) == 0)
    rows, competing = (segments * layers, heads) if scope == "layer" else (segments, layers * heads)
    flat = ranks.reshape(rows, competing * length)
    # Rounded first: 0.3 * 640 is a little more than 192 in binary.
    top = math.ceil(round(ratio * flat.shape[1], 6))
    winners = torch.sort(flat, dim=-1, descending=True, stable=True).indices[:, :top] // length
    counts = torch.zeros((rows, competing), dtype=torch.int32)
    counts.scatter_add_(1, winners, torch.ones_like(winners, dtype=torch.int32))
    return counts.view(segments, layers, heads)

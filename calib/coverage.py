"""Coverage curves: how much of later attention the tokens that a head would keep receive."""

from __future__ import annotations

import torch

from sgl_ragged.profiles.budgets import UNIT
from sgl_ragged.scorers import rank_positions


def coverage_curves(scores: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Peak attention covered by each head's best 16, 32, .. tokens, in the order in which serving keeps them.

    Args:
        scores: float [segments, layers, heads, S]; segment 0 starts the sequence.
        peaks: float [layers, heads, segments * S], peak attention that each token receives.

    Returns:
        float32 [segments, layers, heads, S / 16], never falling along the last axis.
    """
    segments, _, _, length = scores.shape
    order = rank_positions(scores.flatten(1, 2), torch.arange(segments) == 0).view(scores.shape)
    received = peaks.float().unflatten(-1, (segments, length)).permute(2, 0, 1, 3)
    return received.gather(-1, order).unflatten(-1, (length // UNIT, UNIT)).sum(dim=-1).cumsum(dim=-1)

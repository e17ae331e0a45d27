"""From scores to the positions that a head keeps (design section 3)."""

from __future__ import annotations

import torch

from sgl_ragged.budgets import GUARD, SINKS


def keep_positions(scores: torch.Tensor, kept: int, first_segment: torch.Tensor) -> torch.Tensor:
    """Choose `kept` of S positions: sinks, then the guard, then the best scores, ties to the earlier position.

    Where sinks and guard together are more than `kept`, the guard gives way, oldest token first.
    NaN scores rank below everything else, so that the choice is deterministic for any input.

    Args:
        scores: float [segments, heads, S].
        kept: tokens to keep, GUARD <= kept <= S.
        first_segment: bool [segments], whether the segment starts the sequence and so holds the sinks.

    Returns:
        int64 [segments, heads, kept], ascending. Does not change its arguments.
    """
    length = scores.shape[-1]
    ranks = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.finfo(scores.dtype).max)
    position = torch.arange(length, device=scores.device)
    is_sink = first_segment[:, None] & (position < SINKS)
    guard = torch.where(first_segment, min(GUARD, kept - SINKS), GUARD)
    is_guard = position >= length - guard[:, None]
    forced = (is_sink | is_guard)[:, None, :]
    ranks = ranks.masked_fill(forced, torch.inf)
    order = torch.sort(ranks, dim=-1, descending=True, stable=True).indices
    return order[..., :kept].sort(dim=-1).values

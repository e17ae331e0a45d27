"""From scores to the positions that a head keeps."""

from __future__ import annotations

import torch

from sgl_ragged.profiles.budgets import GUARD, SINKS


def forced_first(scores: torch.Tensor, first_segment: torch.Tensor) -> torch.Tensor:
    """Scores with sinks and guard at +inf, +inf as the largest finite number and NaN below everything else.

    Args:
        scores: float [segments, heads, S].
        first_segment: bool [segments], whether the segment starts the sequence and so holds the sinks.

    Returns:
        A new tensor like `scores`.
    """
    length = scores.shape[-1]
    ranks = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.finfo(scores.dtype).max)
    position = torch.arange(length, device=scores.device)
    sinks = first_segment[:, None] & (position < SINKS)
    return ranks.masked_fill((sinks | (position >= length - GUARD))[:, None, :], torch.inf)


def rank_positions(scores: torch.Tensor, first_segment: torch.Tensor) -> torch.Tensor:
    """Order in which positions are kept: sinks, the guard from its end, then the best scores, ties to the earlier.

    NaN scores rank last, so that the order is defined for any input. Arguments as in `forced_first`.

    Returns:
        int64 [segments, heads, S], a permutation of the positions. Does not change its arguments.
    """
    order = torch.sort(forced_first(scores, first_segment), dim=-1, descending=True, stable=True).indices
    # Forced positions come out ascending; where a budget is smaller than all of them, the guard's last tokens win.
    guard_reversed = order.clone()
    guard_reversed[..., SINKS : SINKS + GUARD] = order[..., SINKS : SINKS + GUARD].flip(-1)
    return torch.where(first_segment[:, None, None], guard_reversed, order)


def keep_positions(order: torch.Tensor, kept: int) -> torch.Tensor:
    """The first `kept` of `rank_positions`, ascending: int64 [segments, heads, kept].

    `kept` is at least GUARD. Where sinks and guard together are more, the guard gives way, oldest token first.
    """
    return order[..., :kept].sort(dim=-1).values

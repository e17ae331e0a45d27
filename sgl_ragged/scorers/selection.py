"""Choice of the positions that a head keeps, by their scores."""

from __future__ import annotations

import torch

from sgl_ragged.profiles.budgets import GUARD, SINKS


def forced_first(scores: torch.Tensor, first_segment: torch.Tensor) -> torch.Tensor:
    """Raise the scores of sinks and guard to +inf; replace other +inf by the largest finite number and NaN by -inf.

    Args:
        scores: float [segments, heads, S].
        first_segment: bool [segments], whether the segment starts its sequence, and so has the sinks.

    Returns:
        A new tensor like `scores`.
    """
    length = scores.shape[-1]
    ranks = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.finfo(scores.dtype).max)
    position = torch.arange(length, device=scores.device)
    sinks = first_segment[:, None] & (position < SINKS)
    return ranks.masked_fill((sinks | (position >= length - GUARD))[:, None, :], torch.inf)


def rank_positions(scores: torch.Tensor, first_segment: torch.Tensor) -> torch.Tensor:
    """Rank positions in the order in which they are kept: sinks, the guard from its end, then by falling score.

    Ties go to the earlier position, and NaN ranks last, so that the order is defined for any input. Arguments are those
    of `forced_first`.

    Returns:
        int64 [segments, heads, S], a permutation of the positions. The arguments are not changed.
    """
    order = torch.sort(forced_first(scores, first_segment), dim=-1, descending=True, stable=True).indices
    # The sort leaves sinks and guard ascending. A budget smaller than both must keep the guard's last tokens.
    guard_reversed = order.clone()
    guard_reversed[..., SINKS : SINKS + GUARD] = order[..., SINKS : SINKS + GUARD].flip(-1)
    return torch.where(first_segment[:, None, None], guard_reversed, order)


def keep_positions(order: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the first `kept` positions of `rank_positions`, ascending: int64 [segments, heads, kept].

    Args:
        kept: at least GUARD. If it is less than sinks and guard together, the guard's oldest tokens are dropped.
    """
    return order[..., :kept].sort(dim=-1).values

"""Attention over two sets of keys, put together from attention over each."""

from __future__ import annotations

import torch


def merge_states(
    outputs_a: torch.Tensor, lse_a: torch.Tensor, outputs_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys, for every query.

    A set without keys has a log-sum-exp of -inf; its output may then hold anything, NaN included, and counts for
    nothing. Without keys in either set the output is 0 and the log-sum-exp -inf.

    Args:
        outputs_a, outputs_b: [..., d], softmax-weighted means of the values of each set, in any floating dtype.
        lse_a, lse_b: float32 [...], natural log-sum-exp of the logits of each set.

    Returns:
        The output, float32 [..., d], and its log-sum-exp, float32 [...].
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # (-inf) - (-inf) would be NaN: where neither set has keys, both weights are to be 0.
    anchor = lse.masked_fill(lse == -torch.inf, 0.0)
    output = _weighted(outputs_a, lse_a - anchor) + _weighted(outputs_b, lse_b - anchor)
    return output, lse


def _weighted(outputs: torch.Tensor, log_weights: torch.Tensor) -> torch.Tensor:
    weights = log_weights.exp()[..., None]
    # Selected, not only multiplied by 0: 0 * NaN is NaN.
    return torch.where(weights > 0, outputs * weights, 0.0)

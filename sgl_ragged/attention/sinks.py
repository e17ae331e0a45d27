"""Learned attention sinks: a logit per query head that takes part in the softmax and has no value."""

from __future__ import annotations

import torch


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add learned sinks to attention without them.

    With l the log-sum-exp of a query's logits and s its head's sink, every weight shrinks by
    exp(l) / (exp(l) + exp(s)) = sigmoid(l - s).

    Args:
        output: [tokens, heads, q_per_kv, head_dim].
        lse: float32 [tokens, heads, q_per_kv], natural log-sum-exps.
        sinks: [heads * q_per_kv], of any floating dtype.

    Returns:
        Like `output`, a new tensor.
    """
    shrunk = torch.sigmoid(lse - sinks.float().view(1, *lse.shape[1:]))
    return (output.float() * shrunk[..., None]).to(output.dtype)

"""Find the tokens that a pivot head attends to and its satellites may lack, and when these have changed."""

from __future__ import annotations

import torch

SPREAD, DECAY = 4, 0.5
"""Tokens after an attended one that count as attended, too, each DECAY times as much as the one before: what is read
next often follows what is read now."""


def attended(queries: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, scale: float, first: int) -> torch.Tensor:
    """Return the largest attention of a pivot's query heads to each token of its history, float32 [queries, tokens].

    Args:
        queries: [queries, q_per_kv, head_dim]. lse: float32 [queries, q_per_kv], of all that they attended to.
        keys: [tokens, head_dim], as the cache holds them, from the sequence's first on. scale: what products are
            multiplied by.
        first: position of the first query; the other ones follow it. Each attends up to itself.
    """
    logits = torch.einsum("qgd,td->qgt", queries.float(), keys.float()) * scale
    weights = (logits - lse[..., None]).exp().amax(dim=1)
    positions = first + torch.arange(len(queries), device=keys.device)
    return weights.masked_fill(torch.arange(len(keys), device=keys.device) > positions[:, None], 0.0)


def spread(weights: torch.Tensor) -> torch.Tensor:
    """Return weights [..., tokens] of which a share is passed on to the following tokens. A new tensor."""
    found = weights.clone()
    for distance in range(1, min(SPREAD, weights.shape[-1] - 1) + 1):
        passed = weights[..., :-distance] * DECAY**distance
        found[..., distance:] = torch.maximum(found[..., distance:], passed)
    return found


def candidates(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tokens to fetch, int64 [at most count], best first, for attention float [queries, tokens]."""
    together = spread(weights.amax(dim=0))
    return together.topk(min(count, len(together))).indices


def top_tokens(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return each query's most attended tokens, int64 [queries, at most count], from float [queries, tokens]."""
    return weights.topk(min(count, weights.shape[-1]), dim=-1).indices


def median_overlap(tops: torch.Tensor, base: torch.Tensor) -> float:
    """Return the median over queries of the share of top tokens in a set (HeteroCache, Eq. 9 and 10).

    Args:
        tops: int64 [queries, k]. base: int64 [k], the set of what was fetched for last.
    """
    if not tops.numel():
        return 1.0
    return float(torch.isin(tops, base).float().mean(dim=1).median())

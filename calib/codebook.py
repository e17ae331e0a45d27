"""The codebook: from queries of the samples, and what they saw, to statistics of the profile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from calib.query_moments import Rope, before_rope
from sgl_ragged.profiles.codebook import CODEBOOK, MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.scorers.expected_attention import turn

PER_QUERY_HEAD = 84
"""Queries of each query head in a codebook (docs/fitting.md has the measurement)."""

NEAREST, FARTHEST = 8, 2048
"""Distances from the end of a segment, in tokens, that queries are turned to: evenly over their logarithm. Farther
ones, beyond the context that a model was trained on, would make the fit worse than none."""


def queries_per_sample(samples: int) -> int:
    """How many tokens of each sample are recorded, so that all together are PER_QUERY_HEAD or a few more."""
    return -(-PER_QUERY_HEAD // samples)


def choose_queries(length: int, segment: int, count: int) -> list[int]:
    """Tokens behind the first segment whose queries are recorded, ascending: one in each of `count` equal parts."""
    count = min(count, length - segment)
    edges = np.linspace(segment, length, count + 1).astype(int)
    rng = np.random.default_rng([length, count])
    return [int(rng.integers(low, high)) for low, high in itertools.pairwise(edges)]


def recorded_queries(
    queries: torch.Tensor,
    logits: torch.Tensor,
    values: torch.Tensor,
    segment: int,
    positions: Sequence[int],
    rope: Rope,
) -> dict[str, torch.Tensor]:
    """Tensors of the codebook for some queries of one layer, by name; Q of them.

    Args:
        queries: [Q, heads, q_per_kv, d] after RoPE, of the tokens at `positions`.
        logits: float32 [heads, q_per_kv, Q, tokens] of all tokens before them and their own, -inf behind it.
        values: float32 [heads, tokens, d].

    Returns:
        QUERIES: float16 [heads, q_per_kv, Q, d] before RoPE, dimensions in the order of `rope`. MASSES, OUTPUTS:
        float32 [heads, 2, q_per_kv, Q] and float16 [heads, 2, q_per_kv, Q, d], as in `sgl_ragged.profiles.codebook`.
    """
    turned_back = [before_rope(one[None], position, rope)[0] for one, position in zip(queries, positions, strict=True)]
    behind = logits.clone()
    behind[..., :segment] = -torch.inf
    both = torch.stack([logits, behind], dim=1)
    return {
        QUERIES: torch.stack(turned_back, dim=2).half().cpu(),
        MASSES: both.logsumexp(dim=-1).float().cpu(),
        OUTPUTS: (both.softmax(dim=-1) @ values[:, None, None]).half().cpu(),
    }


def join_queries(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Those of several chunks or samples, of one layer or of all: `recorded_queries` side by side."""
    axes = {QUERIES: -2, MASSES: -1, OUTPUTS: -2}
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name, axis in axes.items()}


def codebook(recordings: Sequence[Mapping[str, torch.Tensor]], context: int, segment: int) -> dict[str, torch.Tensor]:
    """The statistics CODEBOOK and ROPE of the profile; none if the model's positions could not be read.

    Args:
        recordings: of all samples, with tensors [layers, ...] of `recorded_queries`.
        context: tokens that the model was trained on.
    """
    if not all(set(CODEBOOK) <= set(recording) for recording in recordings):
        return {}
    joined = join_queries(recordings)
    queries, rope = joined[QUERIES], {name: recordings[0][name] for name in ROPE}
    count = queries.shape[-2]
    farthest = max(min(FARTHEST, context - segment), NEAREST)
    # Neighbours in the codebook are of one sample, and get distances far from one another.
    spread = (torch.arange(count, dtype=torch.float64) * ((5**0.5 - 1) / 2)) % 1
    distances = NEAREST * (farthest / NEAREST) ** spread
    return {
        QUERIES: turn(queries.double(), distances, rope[ROPE[0]][0, 0]).half().flatten(2, 3),
        MASSES: joined[MASSES].flatten(3, 4),
        OUTPUTS: joined[OUTPUTS].flatten(3, 4),
        **rope,
    }

"""The codebook: queries of the samples and their attention, recorded and made into statistics of the profile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from calib.query_moments import Rope, before_rope
from sgl_ragged.profiles.codebook import CODEBOOK, MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.scorers.expected_attention import rotate

PER_QUERY_HEAD = 84
"""Number of queries of each query head in a codebook (measured in docs/notes/2026-11-fitting.md)."""

NEAREST, FARTHEST = 8, 2048
"""Range of distances from the end of a segment, in tokens, to which queries are rotated, evenly over the logarithm.
Distances beyond the context on which a model was trained would make the fit worse than no fit."""


def queries_per_sample(samples: int) -> int:
    """Return the number of tokens that are recorded in each sample: PER_QUERY_HEAD over all samples, rounded up."""
    return -(-PER_QUERY_HEAD // samples)


def choose_queries(length: int, segment: int, count: int) -> list[int]:
    """Choose tokens after the first segment whose queries are recorded: a random one in each of `count` equal parts."""
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
    """Make the codebook's tensors for Q queries of one layer, by name.

    Args:
        queries: [Q, heads, q_per_kv, d] after RoPE, of the tokens at `positions`.
        logits: float32 [heads, q_per_kv, Q, tokens], -inf for tokens after the query.
        values: float32 [heads, tokens, d].

    Returns:
        QUERIES: float16 [heads, q_per_kv, Q, d] before RoPE, dimensions in `rope.order`.
        MASSES: float32 [heads, 2, q_per_kv, Q], as in `sgl_ragged.profiles.codebook`.
        OUTPUTS: float16 [heads, 2, q_per_kv, Q, d], likewise.
    """
    unrotated = [
        before_rope(query[None], position, rope)[0] for query, position in zip(queries, positions, strict=True)
    ]
    without_first = logits.clone()
    without_first[..., :segment] = -torch.inf
    versions = torch.stack([logits, without_first], dim=1)
    return {
        QUERIES: torch.stack(unrotated, dim=2).half().cpu(),
        MASSES: versions.logsumexp(dim=-1).float().cpu(),
        OUTPUTS: (versions.softmax(dim=-1) @ values[:, None, None]).half().cpu(),
    }


def join_queries(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the results of `recorded_queries` of several chunks or samples, of one layer or of all."""
    axes = {QUERIES: -2, MASSES: -1, OUTPUTS: -2}
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name, axis in axes.items()}


def codebook(recordings: Sequence[Mapping[str, torch.Tensor]], context: int, segment: int) -> dict[str, torch.Tensor]:
    """Make the statistics CODEBOOK and ROPE of the profile; empty if a recording lacks them.

    Args:
        recordings: one per sample, with the tensors of `recorded_queries`, [layers, ...].
        context: length of the context on which the model was trained, in tokens.
    """
    if not all(set(CODEBOOK) <= set(recording) for recording in recordings):
        return {}
    joined = join_queries(recordings)
    queries, rope = joined[QUERIES], {name: recordings[0][name] for name in ROPE}
    count = queries.shape[-2]
    farthest = max(min(FARTHEST, context - segment), NEAREST)
    # Neighbours in the codebook come from one sample, and get distances far from each other.
    spread = (torch.arange(count, dtype=torch.float64) * ((5**0.5 - 1) / 2)) % 1
    distances = NEAREST * (farthest / NEAREST) ** spread
    return {
        QUERIES: rotate(queries.double(), distances, rope[ROPE[0]][0, 0]).half().flatten(2, 3),
        MASSES: joined[MASSES].flatten(3, 4),
        OUTPUTS: joined[OUTPUTS].flatten(3, 4),
        **rope,
    }

"""Interface of scorers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

ALL_QUERIES = sys.maxsize
"""Value of `Scorer.queries` for scorers that need all queries of a segment."""


@dataclass(frozen=True)
class SegmentData:
    """Input of a scorer: finished segments of one layer, of S tokens each; d = head_dim.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE.
        queries: [segments, heads, q_per_kv, W, d] after RoPE, of the last W = min(Scorer.queries, S) tokens; None
            unless the scorer needs queries.
        token_scores: float32 [segments, heads, S], results of `Scorer.token_scores`; None unless the scorer has them.
        scale: factor by which attention multiplies logits.
        statistics: this layer's tensors [heads, ...], or [1, ...] if all heads share them, by the names in
            `Scorer.statistics`.
        segment_indices: integers [segments], the segments' numbers in their sequences, from 0.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None
    token_scores: torch.Tensor | None = None
    scale: float = 1.0
    statistics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    segment_indices: torch.Tensor | None = None


class Scorer(ABC):
    """Ranks the tokens of one finished segment for each head.

    A scorer is a pure function of the segment: no state, no randomness, no access to other segments. So a sealed
    segment depends only on the tokens up to its end, and can be shared.
    """

    name: str
    """Name for --ragged-scorer."""

    queries: int = 0
    """Number of the segment's last queries that `score` needs; they are then stored next to the open segment."""

    statistics: tuple[str, ...] = ()
    """Names of the tensors [layers, heads, ...] that the scorer needs, from the profile or a weights file."""

    shared_statistics: tuple[str, ...] = ()
    """Names in `statistics` of tensors that all heads of a layer share, [layers, 1, ...]."""

    axes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Names of a statistic's dimensions after [layers, heads], by its name. Dimensions with equal names must have equal
    lengths; `head_dim` and `q_per_kv` are the model's. Statistics without an entry are not checked."""

    trained: bool = False
    """Whether calibration trains the statistics."""

    counts_positions: bool = False
    """Whether `score` uses a token's index in the sequence as its position under RoPE, which is wrong with M-RoPE."""

    reads_hidden_states: bool = False
    """Whether `token_scores` must be called with the input of every attention layer."""

    scores_tokens_alone: bool = False
    """Whether `score` returns `SegmentData.token_scores` and uses no other field."""

    @abstractmethod
    def score(self, segment: SegmentData) -> torch.Tensor:
        """Score tokens; higher is kept first. NaN ranks last, ties go to the earlier token.

        Returns:
            float32 [segments, heads, S]. The argument is not changed.
        """

    def token_scores(self, hidden_states: torch.Tensor, statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Score single tokens by the input of the attention layer; called only if `reads_hidden_states`.

        Args:
            hidden_states: [tokens, hidden size].
            statistics: as in SegmentData.

        Returns:
            float32 [tokens, heads].
        """
        raise TypeError(f"scorer {self.name!r} does not read hidden states")

    def refuse_statistics(self, statistics: Mapping[str, torch.Tensor]) -> str | None:
        """Return a reason to refuse these tensors, or None.

        Args:
            statistics: finite tensors [layers, heads, ...], by name, in the shapes of `axes`.
        """
        return None

    def input_shape(self, segment: int, q_per_kv: int, head_dim: int) -> tuple[int, int]:
        """Return the shape of a head's inputs that are stored next to an open segment.

        Returns:
            (rows, elements per row); (0, 0) if the scorer needs none.
        """
        if self.reads_hidden_states:
            return segment, 1
        rows = min(self.queries, segment)
        return (rows, q_per_kv * head_dim) if rows else (0, 0)


def window_attention(segment: SegmentData) -> torch.Tensor:
    """Compute causal attention weights of the segment's last W queries over its S tokens.

    Returns:
        float32 [segments, heads, q_per_kv, W, S]; every row sums to 1 over the tokens up to its query.
    """
    assert segment.queries is not None, "scorers set `queries` to get them"
    logits = segment.queries.float() @ segment.keys.float()[:, :, None].transpose(-1, -2) * segment.scale
    window, length = logits.shape[-2:]
    query = torch.arange(length - window, length, device=logits.device)
    later = torch.arange(length, device=logits.device) > query[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(dim=-1)

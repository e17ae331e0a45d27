"""What a scorer is."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

ALL_QUERIES = sys.maxsize
"""Value of `Scorer.queries` for scorers that need every query of a segment."""


@dataclass(frozen=True)
class SegmentData:
    """Finished segments of one layer, as a scorer sees them; S tokens each, d = head_dim.

    keys, values: [segments, heads, S, d], keys after RoPE.
    queries: [segments, heads, q_per_kv, W, d] after RoPE, those of the last W = min(Scorer.queries, S) tokens;
        None unless the scorer asks for queries.
    token_scores: float32 [segments, heads, S], what `Scorer.token_scores` gave; None unless the scorer has them.
    scale: what attention multiplies logits by.
    statistics: this layer's tensors [heads, ...], or [1, ...] where all heads share them, by the names in
        `Scorer.statistics`.
    segment_indices: integers [segments], the segments' numbers in their sequences, from 0: functions of the prefix.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None
    token_scores: torch.Tensor | None = None
    scale: float = 1.0
    statistics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    segment_indices: torch.Tensor | None = None


class Scorer(ABC):
    """Ranks the tokens of one finished segment for every head on its own.

    A scorer is a pure function of the segment: no state, no randomness, no look at other segments. That is
    what makes a sealed segment depend on the tokens up to its end alone, so that it can be shared.
    """

    name: str
    """Name for --ragged-scorer."""

    queries: int = 0
    """How many of the segment's last queries `score` needs; they are then stored beside the tail."""

    statistics: tuple[str, ...] = ()
    """Names of the tensors [layers, heads, ...] that `score` needs, from the profile or the gates file."""

    shared_statistics: tuple[str, ...] = ()
    """Those of `statistics` that all heads of a layer share, [layers, 1, ...]."""

    axes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """By name of a statistic, its dimensions behind [layers, heads]: equal names are equally long. `head_dim` and
    `q_per_kv` are the model's. Statistics that are not named here are taken as they are."""

    trained: bool = False
    """True where calibration trains the statistics."""

    counts_positions: bool = False
    """True where `score` takes a token's place in the sequence for its position under RoPE. With M-RoPE it is not."""

    reads_hidden_states: bool = False
    """True where `token_scores` is to be called with the input of every attention layer."""

    scores_tokens_alone: bool = False
    """True where `score` gives back `SegmentData.token_scores` and looks at nothing else of a segment."""

    @abstractmethod
    def score(self, segment: SegmentData) -> torch.Tensor:
        """Score tokens; higher is kept first. NaN ranks last, ties go to the earlier token.

        Returns:
            float32 [segments, heads, S]. Does not change its argument.
        """

    def token_scores(self, hidden_states: torch.Tensor, statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Score single tokens from what enters the attention layer; only for `reads_hidden_states`.

        Args:
            hidden_states: [tokens, hidden size].
            statistics: as in SegmentData.

        Returns:
            float32 [tokens, heads].
        """
        raise TypeError(f"scorer {self.name!r} does not read hidden states")

    def refuse_statistics(self, statistics: Mapping[str, torch.Tensor]) -> str | None:
        """Why these tensors, [layers, heads, ...] in the shapes of `axes` and finite, cannot be; None if they can."""
        return None

    def input_shape(self, segment: int, q_per_kv: int, head_dim: int) -> tuple[int, int]:
        """Shape of what is stored beside the tail for each head: (places, elements per place), (0, 0) for nothing."""
        if self.reads_hidden_states:
            return segment, 1
        places = min(self.queries, segment)
        return (places, q_per_kv * head_dim) if places else (0, 0)

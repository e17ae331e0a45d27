"""H2O: keep heavy hitters, the tokens that receive most attention inside the segment."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import ALL_QUERIES, Scorer, SegmentData, window_attention


class H2O(Scorer):
    """Scores a token by the attention that it receives per query after it, mean over the group's query heads.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (2023). The paper accumulates sums, which favours early tokens. Here the sum of token i of S is divided by S - i,
    the number of queries in the segment that see it.
    """

    name = "h2o"
    queries = ALL_QUERIES

    def score(self, segment: SegmentData) -> torch.Tensor:
        received = window_attention(segment).mean(dim=2).sum(dim=2)
        seen_by = torch.arange(received.shape[-1], 0, -1, device=received.device)
        return received / seen_by

"""H2O: keep the heavy hitters, the tokens that receive most attention inside the segment."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import ALL_QUERIES, Scorer, SegmentData
from sgl_ragged.scorers.window_attention import window_attention


class H2O(Scorer):
    """Attention received per query that could see the token, mean over the group's query heads.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (2023). The paper accumulates sums, which favours early tokens; token i of S is seen by S - i queries of its
    segment, and the sum is divided by that.
    """

    name = "h2o"
    queries = ALL_QUERIES

    def score(self, segment: SegmentData) -> torch.Tensor:
        received = window_attention(segment).mean(dim=2).sum(dim=2)
        seen_by = torch.arange(received.shape[-1], 0, -1, device=received.device)
        return received / seen_by

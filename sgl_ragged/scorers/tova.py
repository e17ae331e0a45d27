"""TOVA: keep the tokens that the last query of the segment attends to."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData, window_attention


class Tova(Scorer):
    """Scores a token by the attention of the segment's last query, mean over the group's query heads.

    Source: Oren et al., "Transformers are Multi-State RNNs" (2024). The paper evicts one token per step by the
    current query, for all heads. Here the last query of the segment decides once, for each KV head.
    """

    name = "tova"
    queries = 1

    def score(self, segment: SegmentData) -> torch.Tensor:
        return window_attention(segment).mean(dim=(2, 3))

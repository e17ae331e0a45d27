"""TOVA: what the last query of the segment looks at."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData
from sgl_ragged.scorers.window_attention import window_attention


class Tova(Scorer):
    """Attention of the segment's last query, mean over the group's query heads.

    Source: Oren et al., "Transformers are Multi-State RNNs" (2024). The paper evicts one token per step by the
    current query; here the last query of the segment decides once, and each KV head for itself.
    """

    name = "tova"
    queries = 1

    def score(self, segment: SegmentData) -> torch.Tensor:
        return window_attention(segment).mean(dim=(2, 3))

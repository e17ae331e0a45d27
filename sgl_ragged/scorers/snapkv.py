"""SnapKV: keep the tokens that the last queries of the segment attend to, smoothed over neighbours."""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

from sgl_ragged.profiles.budgets import GUARD
from sgl_ragged.scorers.base import Scorer, SegmentData, window_attention


class SnapKV(Scorer):
    """Scores a token by the mean attention of the observation window's queries and query heads, average-pooled.

    Source: Li et al., "SnapKV: LLM Knows What You Are Looking for Before Generation" (2024). The observation window
    is the guard, the last 16 tokens of the segment, which are always kept, as the paper keeps its window. Pooling over
    5 tokens applies to the tokens before the window.
    """

    name = "snapkv"
    queries = GUARD
    kernel = 5

    def score(self, segment: SegmentData) -> torch.Tensor:
        received = window_attention(segment).mean(dim=(2, 3))
        before, window = received[..., : -self.queries], received[..., -self.queries :]
        pooled = avg_pool1d(before, self.kernel, stride=1, padding=self.kernel // 2, count_include_pad=False)
        return torch.cat([pooled, window], dim=-1)

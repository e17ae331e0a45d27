"""Streaming: keep sinks and the most recent tokens."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData


class Streaming(Scorer):
    """Scores a token by its index: score_i = i. With the sinks this is StreamingLLM's pattern in each segment.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). This is the
    baseline for other scorers, since it depends on positions only.
    """

    name = "streaming"

    def score(self, segment: SegmentData) -> torch.Tensor:
        shape = segment.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=segment.keys.device).expand(shape)

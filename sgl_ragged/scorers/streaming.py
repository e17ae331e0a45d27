"""Streaming: sinks and the most recent tokens, whatever they are."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData


class Streaming(Scorer):
    """score_i = i: later tokens of the segment first. With the sinks this is StreamingLLM's pattern per segment.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). The baseline that a
    scorer has to beat: it looks at positions alone.
    """

    name = "streaming"

    def score(self, segment: SegmentData) -> torch.Tensor:
        shape = segment.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=segment.keys.device).expand(shape)

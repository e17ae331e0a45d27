"""Streaming: sinks and the most recent tokens, whatever they are."""

from __future__ import annotations

import torch


class Streaming:
    """score_i = i: later tokens of the segment first. With the sinks this is StreamingLLM's pattern per segment.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). The baseline that a
    scorer has to beat: it looks at positions alone.
    """

    name = "streaming"

    def score(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(keys.shape[-2], dtype=torch.float32, device=keys.device)
        return positions.expand(keys.shape[:-1])

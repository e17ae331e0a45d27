"""Value norm over key norm: keep tokens with large values and small keys, as PagedEviction does."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData


class ValueKeyNorm(Scorer):
    """Scores a token by score_i = |v_i|_2 / |k_i|_2; a key of zeros counts as the smallest positive norm.

    Source: Chitty-Venkata et al., "PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large
    Language Model Inference" (2025), the token importance of its Algorithm 2 (prefill).
    """

    name = "value_key_norm"

    def score(self, segment: SegmentData) -> torch.Tensor:
        tiny = torch.finfo(torch.float32).tiny
        return segment.values.float().norm(dim=-1) / segment.keys.float().norm(dim=-1).clamp_min(tiny)

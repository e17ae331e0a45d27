"""KeyDiff: keep the keys that are least similar to the average key."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from sgl_ragged.scorers.base import Scorer, SegmentData


class KeyDiff(Scorer):
    """Scores a token by the negative cosine similarity of its key to the mean of the normalised keys.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (2025), the anchor variant: score_i = -cos(k_i, mean_j k_j / |k_j|).
    """

    name = "keydiff"

    def score(self, segment: SegmentData) -> torch.Tensor:
        directions = normalize(segment.keys.float(), dim=-1)
        anchor = normalize(directions.mean(dim=-2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)

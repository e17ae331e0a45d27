"""Key norm: keep the keys with the smallest norm."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData


class KeyNorm(Scorer):
    """Scores a token by its key's norm: score_i = -|k_i|_2.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024).
    """

    name = "key_norm"

    def score(self, segment: SegmentData) -> torch.Tensor:
        return -segment.keys.float().norm(dim=-1)

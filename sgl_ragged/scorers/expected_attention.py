"""Expected attention: what queries like those of the calibration are expected to look at."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData


class ExpectedAttention(Scorer):
    """Expected attention weight of each token under Gaussian queries, times the norm of its value.

    With queries ~ N(mean, covariance) and c = scale, E[exp(c q.k)] = exp(c mean.k + c^2 k'covariance k / 2),
    normalised over the segment, mean over the group's query heads.

    Source: Devoto, Jeblick, Jegou, "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution" (2025). The paper estimates the queries' distribution from the prompt and averages RoPE over
    the next positions. Here it comes from the profile and is taken after RoPE, over all positions of the calibration
    samples: no queries are needed at run time, and contexts should not be much longer than those samples.
    """

    name = "expected_attention"
    statistics = ("query_mean", "query_covariance")

    def score(self, segment: SegmentData) -> torch.Tensor:
        mean, covariance = (segment.statistics[name].float() for name in self.statistics)
        keys = segment.keys.float()[:, :, None]
        linear = (keys @ mean[..., None])[..., 0]
        quadratic = ((keys @ covariance) * keys).sum(dim=-1)
        logits = segment.scale * linear + segment.scale**2 / 2 * quadratic
        return logits.softmax(dim=-1).mean(dim=2) * segment.values.float().norm(dim=-1)

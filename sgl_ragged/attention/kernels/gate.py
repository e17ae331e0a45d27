"""Gate: the scorer's network after its first product (`scorers.gate.FoldedGate`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import columns
from sgl_ragged.scorers.gate import STEP

_STEP = tl.constexpr(STEP)
_HALF_ROOT = tl.constexpr(0.5**0.5)

# Where float32 numbers of this size lie, they are 1 apart: adding and subtracting it rounds, ties to even numbers.
_ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def gate_score(features_ptr, output_ptr, token, head, feature_stride, FEATURES: tl.constexpr):
    """Return the score of one token in one head, float32; equal features give equal bits."""
    number = tl.arange(0, columns(FEATURES))
    inside = number < FEATURES
    at = features_ptr + token * feature_stride
    shut = tl.load(at + number, mask=inside, other=0.0)
    opened = 0.5 * shut * (1.0 + tl.erf(shut * _HALF_ROOT))
    weights = tl.load(output_ptr + head * FEATURES + number, mask=inside, other=0.0)
    score = (tl.load(at + FEATURES + head) + tl.sum(opened * weights, axis=0)) / _STEP
    nearest = (score + _ROUNDS) - _ROUNDS
    return tl.where(tl.abs(score) < 2.0**22, nearest, score) * _STEP


@triton.jit(do_not_specialize=["feature_stride"])
def gate_kernel(features_ptr, output_ptr, scores_ptr, feature_stride, FEATURES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    score = gate_score(features_ptr, output_ptr, token, head, feature_stride, FEATURES)
    tl.store(scores_ptr + token * tl.num_programs(1) + head, score)


def gate_scores(features: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Compute `FoldedGate.scores`, float32 [tokens, heads].

    Args:
        features: float32 [tokens, features + heads], rows of which lie together. output: float32 [heads, features].
    """
    tokens, (heads, count) = len(features), output.shape
    scores = torch.empty((tokens, heads), dtype=torch.float32, device=features.device)
    if tokens:
        gate_kernel[(tokens, heads)](features, output, scores, features.stride(0), FEATURES=count, num_warps=1)
    return scores

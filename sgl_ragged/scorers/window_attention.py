"""Attention that the last queries of a segment pay inside it: what SnapKV, TOVA and H2O look at."""

from __future__ import annotations

import torch

from sgl_ragged.scorers.base import SegmentData


def window_attention(segment: SegmentData) -> torch.Tensor:
    """Causal attention weights of the segment's last W queries over its S tokens, in float32.

    Returns:
        float32 [segments, heads, q_per_kv, W, S]; every row sums to 1 over the tokens up to its query.
    """
    assert segment.queries is not None, "the scorer must say how many queries it needs"
    logits = segment.queries.float() @ segment.keys.float()[:, :, None].transpose(-1, -2) * segment.scale
    window, length = logits.shape[-2:]
    query = torch.arange(length - window, length, device=logits.device)
    later = torch.arange(length, device=logits.device) > query[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(dim=-1)

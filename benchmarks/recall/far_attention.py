"""Causal attention for Llama that also reports how much attention each head pays to far tokens.

Far is what is neither near (the last ``NEAR`` tokens up to the query) nor a sink (the first ``SINKS`` of the sequence).
The output is that of plain attention; far attention is worked out at a few probed queries only, which costs little.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NEAR = 64
SINKS = 4
IMPLEMENTATION = "recall_far_attention"


@dataclass
class Probe:
    """Asks for far attention at ``positions`` [batch, probes] int64; the layers append to ``shares`` in their order."""

    positions: Tensor
    shares: list[Tensor] = field(default_factory=list)

    def by_layer(self) -> Tensor:
        """Share of attention on far tokens, [layers, batch, query heads, probes] in 0..1."""
        return torch.stack(self.shares)


def far_share(query: Tensor, key: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Share of attention on far tokens, [batch, heads, probes] in 0..1.

    query and key [batch, heads, T, head_dim] after RoPE, positions [batch, probes] int64 of the queries to look at.
    """
    batch, heads, length, head_dim = query.shape
    index = positions[:, None, :, None].expand(batch, heads, -1, head_dim)
    logits = query.gather(2, index) @ key.transpose(2, 3) * scale
    distance = (positions[:, :, None] - torch.arange(length))[:, None]  # [batch, 1, probes, T]
    weights = logits.masked_fill(distance < 0, float("-inf")).softmax(dim=-1)
    far = distance >= NEAR
    far[..., :SINKS] = False
    return (weights * far).sum(dim=-1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    probe: Probe | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [batch, query heads, T, d], key and value by KV head."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if probe is not None:
        probe.shares.append(far_share(query, key, probe.positions, scaling))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attention)

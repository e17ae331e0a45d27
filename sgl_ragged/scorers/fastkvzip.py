"""Fast KVzip: trained gates score each token from the hidden state that enters the attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from sgl_ragged.scorers.base import Scorer, SegmentData

_EPSILON = 1e-6


class FastKVzip(Scorer):
    """Scores a token by a sigmoid-like gate of its low-rank query and key, against learned sink keys.

    With q = norm(Wq h + bq) per query head, k = norm(Wk h) per head, rank D and sink keys s_j:
    score = mean over the group of 1 / (1 + sum_j exp((s_j.q - k.q) / sqrt(D) - b)).

    Source: Kim, Han, Yun, "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction" (2026), its
    low-rank sink-attention gate. The weights come from a safetensors file (docs/scorers.md) that the user must give.
    """

    name = "fastkvzip"
    statistics = ("q_proj", "q_bias", "k_proj", "q_norm", "k_norm", "sink_keys", "bias")
    axes = MappingProxyType(
        {
            "q_proj": ("q_per_kv", "rank", "hidden size"),
            "q_bias": ("q_per_kv", "rank"),
            "k_proj": ("rank", "hidden size"),
            "q_norm": ("rank",),
            "k_norm": ("rank",),
            "sink_keys": ("sinks", "rank"),
            "bias": ("q_per_kv",),
        }
    )
    reads_hidden_states = True
    scores_tokens_alone = True

    def token_scores(self, hidden_states: torch.Tensor, statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        gate = {name: statistics[name].float() for name in self.statistics}
        hidden = hidden_states.float()
        rank = gate["k_proj"].shape[1]
        queries = torch.einsum("te,hqre->thqr", hidden, gate["q_proj"]) + gate["q_bias"]
        queries = _rms_norm(queries) * gate["q_norm"][:, None]
        keys = _rms_norm(torch.einsum("te,hre->thr", hidden, gate["k_proj"])) * gate["k_norm"]
        own = torch.einsum("thqr,thr->thq", queries, keys) / rank**0.5 + gate["bias"]
        sinks = torch.einsum("thqr,hjr->thqj", queries, gate["sink_keys"]) / rank**0.5
        return (1 / (1 + (sinks - own[..., None]).exp().sum(dim=-1))).mean(dim=-1)

    def score(self, segment: SegmentData) -> torch.Tensor:
        assert segment.token_scores is not None, "gates are computed before the segment is sealed"
        return segment.token_scores.float()


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt()

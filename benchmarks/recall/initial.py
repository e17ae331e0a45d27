"""Initial weights of the recall model: random, but with heads in the first layer that attend to the previous token.

Recall needs such heads before anything else can form. Llama has no biases, so attention by position alone needs a
direction that all embeddings share, and from purely random weights training spends most of its time on finding one.
Everything here stays trainable.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PREVIOUS_HEADS = 4  # KV heads of the first layer, with all their query heads
FAST_PAIRS = 6  # rotary pairs that tell neighbours apart; the slower ones stay random, free for content
GAIN = 6.5  # length of a pair in q and k: makes the previous token's logit exceed its neighbours' by about 4


def initial_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A fresh float32 model, drawn from torch's global generator."""
    model = LlamaForCausalLM(config)
    shared = torch.randn(config.hidden_size)
    attention = model.model.layers[0].self_attn
    queries = PREVIOUS_HEADS * config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        model.model.embed_tokens.weight += config.initializer_range * shared
        # After RMSNorm the shared part is 1/sqrt(2) of an embedding, of length sqrt(hidden_size / 2).
        read = shared / shared.norm() / (config.hidden_size / 2) ** 0.5
        query_rows = _pointing(config, queries, config.num_attention_heads, turn=-1.0)
        key_rows = _pointing(config, PREVIOUS_HEADS, config.num_key_value_heads, turn=0.0)
        attention.q_proj.weight += query_rows[:, None] * read
        attention.k_proj.weight += key_rows[:, None] * read
    return model


def _pointing(config: LlamaConfig, heads: int, all_heads: int, turn: float) -> Tensor:
    """Rows [all_heads * head_dim] of q or k whose first ``heads`` heads point as RoPE does at position ``turn``.

    RoPE turns the pair (i, i + head_dim / 2) by position * theta^(-2i / head_dim), so a query turned by -1 is aligned
    with the key one position before it.
    """
    half = config.head_dim // 2
    angles = turn * config.rope_parameters["rope_theta"] ** (-torch.arange(FAST_PAIRS) / half)
    head = torch.zeros(config.head_dim)
    head[:FAST_PAIRS], head[half : half + FAST_PAIRS] = GAIN * angles.cos(), GAIN * angles.sin()
    return torch.cat([head.repeat(heads), torch.zeros((all_heads - heads) * config.head_dim)])

"""Small random models of many families: one config each, made by transformers and saved where a server loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import SIZES

SMALL = SIZES | dict(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    pad_token_id=0,
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[])
WINDOW = 64
"""Tokens that the layers with sliding windows attend to, as the configs count them."""

MIXED = dict(
    num_hidden_layers=4,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
)


NO_TRITON = "the gate of its shared expert is a Triton kernel without another form ('0 active drivers')"
NO_SINKS = "its attention on CPUs takes no sinks (TorchNativeAttnBackend: unexpected keyword argument 'sinks')"
NO_BACKEND = "'One of the attention backends in [fa3, triton, trtllm_mha] is required for Exaone4ForCausalLM'"


@dataclass(frozen=True)
class Family:
    """How a model is made: `config` and `model` are names in transformers.

    sizes: what differs from SMALL.
    blocked: why SGLang itself cannot serve it on CPUs, if so.
    """

    config: str
    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    blocked: str | None = None

    def make(self, folder: Path) -> Path:
        """A random model of this family, saved in `folder`, float32."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**(SMALL | dict(self.sizes))))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # transformers makes biases zero, with which they could as well be missing.
                if name.endswith("bias"):
                    parameter.normal_(0, SMALL["initializer_range"])
        model.to(torch.float32).save_pretrained(folder)
        return folder


PLAIN: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "qwen2_moe": Family(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 64}, NO_TRITON
    ),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": Family(
        "OlmoeConfig", "OlmoeForCausalLM", dict(num_key_value_heads=8, num_experts=4, num_experts_per_tok=2)
    ),
    # SGLang serves it without its window.
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM"),
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        dict(attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=2.0),
    ),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"attention_bias": True}),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", {"tie_word_embeddings": True}),
    "starcoder2": Family("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    "gpt2": Family(
        "GPT2Config", "GPT2LMHeadModel", dict(n_positions=1024, num_key_value_heads=8, tie_word_embeddings=True)
    ),
}
"""Families whose layers all attend to the whole history."""

WINDOWED: dict[str, Family] = {
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM", MIXED | dict(num_local_experts=4, num_experts_per_tok=2), NO_SINKS
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", MIXED | {"rope_parameters": None, "tie_word_embeddings": True}
    ),
    "exaone4": Family(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        # The base that SGLang takes where a config has it among other parameters of RoPE, as those of today have.
        MIXED | {"sliding_window_pattern": "LG", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        NO_BACKEND,
    ),
    "cohere2": Family("Cohere2Config", "Cohere2ForCausalLM", MIXED | {"tie_word_embeddings": True}),
    "olmo3": Family("Olmo3Config", "Olmo3ForCausalLM", MIXED),
}
"""Families with sliding windows of WINDOW tokens in every other layer."""

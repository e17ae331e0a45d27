"""The shape of a model's attention: what budgets, layouts and profiles are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_ragged.fingerprint import config_fingerprint, text_config


@dataclass(frozen=True)
class ModelGeometry:
    """Layers, heads and fingerprint of one model; `name` is for messages."""

    name: str
    fingerprint: str
    num_layers: int
    num_heads: int
    q_per_kv: int
    head_dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelGeometry:
        """From a Hugging Face config; KeyError if its language model lacks layers or heads."""
        config = text_config(config)
        query_heads = config["num_attention_heads"]
        heads = config.get("num_key_value_heads") or query_heads
        return cls(
            name=name,
            fingerprint=config_fingerprint(config),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=int(heads),
            q_per_kv=int(query_heads // heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // query_heads),
        )

"""Fingerprint of a model's attention geometry, which ties a profile to the models that it fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Everything that decides which (layer, head) a budget belongs to and how its keys are distributed.
_KEYS = (
    "architectures",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "rope_theta",
    "rope_type",
    "vocab_size",
)


_LANGUAGE_MODELS = ("thinker_config", "llm_config", "language_config", "text_config")
"""Keys of the language model's config in configs of multimodal models, in SGLang's order of preference."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config with the whole model's architecture; the config itself if it has no
    such part.

    The architecture distinguishes models that share a language model.
    """
    for name in _LANGUAGE_MODELS:
        if isinstance(config.get(name), Mapping):
            return {**text_config(config[name]), "architectures": config.get("architectures")}
    return config


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Compute the fingerprint of a Hugging Face model config: 16 hex digits over its attention geometry.

    Finetunes that keep the geometry have the fingerprint of their base model.

    Args:
        config: `config.json` as a mapping. `head_dim` falls back to hidden_size / num_attention_heads and
            `num_key_value_heads` to num_attention_heads. `rope_theta` and `rope_type` are also read from
            `rope_parameters` and `rope_scaling`, so that the file and the loaded config agree.
    """
    values = dict(config)
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if values.get("rope_theta") is None:
        values["rope_theta"] = rope.get("rope_theta")
    values["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if values.get("head_dim") is None and values.get("hidden_size") and values.get("num_attention_heads"):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if values.get("rope_theta") is not None:
        values["rope_theta"] = float(values["rope_theta"])
    geometry = {key: values.get(key) for key in _KEYS}
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()[:16]

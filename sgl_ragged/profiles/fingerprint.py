"""Fingerprint of a model's attention geometry: what ties a profile to the models that it fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Everything that decides which (layer, head) a budget belongs to and what its keys look like.
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
"""Where configs of models that take more than text have that of their language model; SGLang looks in this order."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, under the whole model's architecture; the config itself if it has none.

    Models with the same language model are told apart by what surrounds it, whether its part is nested or not.
    """
    for name in _LANGUAGE_MODELS:
        if isinstance(config.get(name), Mapping):
            return {**text_config(config[name]), "architectures": config.get("architectures")}
    return config


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Fingerprint of a Hugging Face model config: 16 hex digits over its attention geometry.

    Finetunes that keep the geometry have the fingerprint of the model that they come from.

    Args:
        config: `config.json` as a mapping. Keys that are absent count as absent; `head_dim` falls back to
            hidden_size / num_attention_heads and `num_key_value_heads` to num_attention_heads. `rope_theta` and
            `rope_type` are found inside `rope_parameters` and `rope_scaling` too, so that the file and the loaded
            config agree.
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

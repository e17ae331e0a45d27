"""Shape of a model's attention, for which budgets, layouts and profiles are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_ragged.profiles.fingerprint import config_fingerprint, text_config

_WINDOWS_IGNORED = ("Qwen2", "Qwen3", "Mistral")
"""Prefixes of architecture names whose sliding windows SGLang ignores: all their layers have full attention."""


@dataclass(frozen=True)
class WindowedLayers:
    """A model's sliding-window layers, whose keys and values SGLang stores in a separate pool.

    Args:
        layers: numbers of the layers in the model, ascending.
        window: number of tokens that a query sees, including its own.
        elements_per_token: elements of keys and values in all these layers and heads together.
    """

    layers: tuple[int, ...]
    window: int
    elements_per_token: int


@dataclass(frozen=True)
class ModelGeometry:
    """Layers, heads and fingerprint of one model.

    Args:
        name: name of the model in messages.
        num_layers: number of full-attention layers; only these have budgets and are stored in slabs.
        num_heads: KV heads per layer.
        q_per_kv: query heads per KV head.
        windowed: sliding-window layers, if there are any.
        first_layer: number of the first layer in the model, if this is a pipeline stage.
    """

    name: str
    fingerprint: str
    num_layers: int
    num_heads: int
    q_per_kv: int
    head_dim: int
    windowed: WindowedLayers | None = None
    first_layer: int = 0

    @property
    def all_layers(self) -> int:
        """Number of layers in the model, including sliding-window layers."""
        return self.num_layers + (len(self.windowed.layers) if self.windowed else 0)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the full-attention layers in the model, ascending."""
        windowed = set(self.windowed.layers) if self.windowed else set()
        numbers = range(self.first_layer, self.first_layer + self.all_layers)
        return tuple(number for number in numbers if number not in windowed)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelGeometry:
        """Read a Hugging Face config. Raises KeyError if its language model lacks layers or heads."""
        config = text_config(config)
        query_heads = config["num_attention_heads"]
        heads = int(config.get("num_key_value_heads") or query_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // query_heads)
        windowed = windowed_layers(config, heads, head_dim)
        return cls(
            name=name,
            fingerprint=config_fingerprint(config),
            num_layers=int(config["num_hidden_layers"]) - (len(windowed.layers) if windowed else 0),
            num_heads=heads,
            q_per_kv=int(query_heads // heads),
            head_dim=head_dim,
            windowed=windowed,
        )


def windowed_layers(config: Mapping[str, Any], num_heads: int, head_dim: int) -> WindowedLayers | None:
    """Read the sliding-window layers of a Hugging Face config, as SGLang serves them; None if there are none.

    Args:
        config: config of the text model. `layer_types` lists the kind of each layer; or `sliding_window_pattern` gives
            the period of full-attention layers, as a number or as a word with one letter per layer.
    """
    if any(name.startswith(_WINDOWS_IGNORED) for name in config.get("architectures") or ()):
        return None
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if kinds is None and pattern:
        period = pattern if isinstance(pattern, int) else len(pattern)
        numbers = range(1, int(config["num_hidden_layers"]) + 1)
        kinds = ["sliding_attention" if number % period else "full_attention" for number in numbers]
    layers = tuple(number for number, kind in enumerate(kinds or ()) if kind == "sliding_attention")
    if not layers or not config.get("sliding_window"):
        return None
    return WindowedLayers(layers, int(config["sliding_window"]), 2 * len(layers) * num_heads * head_dim)

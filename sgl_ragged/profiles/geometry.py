"""The shape of a model's attention: what budgets, layouts and profiles are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_ragged.profiles.fingerprint import config_fingerprint, text_config

_WINDOWS_IGNORED = ("Qwen2", "Qwen3", "Mistral")
"""Starts of architecture names whose sliding windows SGLang's model classes do not read: they attend to everything."""


@dataclass(frozen=True)
class WindowedLayers:
    """A model's sliding-window layers, whose keys and values SGLang keeps in a pool of its own.

    layers: their numbers in the model, ascending.
    window: tokens that a query sees, itself among them.
    elements_per_token: of keys and values, of all these layers and heads together.
    """

    layers: tuple[int, ...]
    window: int
    elements_per_token: int


@dataclass(frozen=True)
class ModelGeometry:
    """Heads and fingerprint of one model, and its layers with full attention; `name` is for messages.

    num_layers: those that attend to everything; only they have budgets and lie in slabs.
    windowed: the others, if there are any.
    first_layer: number of the first of them, where they are a pipeline stage of the model.
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
        """Layers of the model, those with windows among them."""
        return self.num_layers + (len(self.windowed.layers) if self.windowed else 0)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's numbers of its layers with full attention, ascending."""
        others = set(self.windowed.layers) if self.windowed else set()
        numbers = range(self.first_layer, self.first_layer + self.all_layers)
        return tuple(number for number in numbers if number not in others)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelGeometry:
        """From a Hugging Face config; KeyError if its language model lacks layers or heads."""
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
    """The layers of a Hugging Face config whose queries see a window of tokens, as SGLang serves them; None without.

    Args:
        config: of the text model. It lists the kind of each layer, or says after how many windowed layers a full one
            comes (a number, or a word with a letter for each layer).
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

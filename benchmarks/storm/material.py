"""What storms are run with: small random models, profiles, gates and adapters, made once in a folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.recall import MODEL
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.head_statistics import PIVOT_ORDER, WATCHED
from sgl_ragged.profiles.profile import VALUE_MEAN, Profile

RECALL, GPT_OSS, GEMMA3 = "recall", "gpt-oss", "gemma3"
"""The demo's model, and random ones with sliding windows."""

WINDOW = 64
"""Tokens that windowed layers attend to."""

ADAPTERS = 2
RANK = 8

_SIZES: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    # Five times the usual spread: attention is far from uniform, so that a wrong mask shows, and rounding still small.
    initializer_range=0.1,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    GPT_OSS: (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
    ),
    GEMMA3: ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(tie_word_embeddings=True)),
}


class Material:
    """Files under `folder`, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019
    def model(self, name: str) -> Path:
        """Folder of the model, float32 but for the demo's."""
        if name == RECALL:
            return MODEL
        import transformers

        config, kind, sizes = _FAMILIES[name]
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**(_SIZES | sizes)))
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                # transformers makes biases zero, with which they could as well be missing.
                if parameter.endswith("bias"):
                    value.normal_(0, _SIZES["initializer_range"])
        model.to(torch.float32).save_pretrained(self.folder / name)
        return self.folder / name

    @functools.cache  # noqa: B019
    def profile(self, model: str, scorer: str, segment: int) -> Path:
        """Random and strongly unequal needs of heads, with random statistics of the scorer, a codebook, two pivots,
        and means."""
        folder = self.model(model)
        config = json.loads((folder / "config.json").read_text())
        geometry = ModelGeometry.from_config(config, folder.name)
        rng = np.random.default_rng(1)
        shape = (geometry.num_layers, geometry.num_heads)
        order, watched = np.full(shape, -1, np.float32), np.zeros((*shape, 2), np.float32)
        for number, (layer, head) in enumerate(((0, 1), (1, 2))):
            order[layer, head] = number
            watched[layer:, :, number] = rng.uniform(0.1, 1.0, watched[layer:].shape[:2])
        statistics = {
            VALUE_MEAN: 0.1 * rng.normal(size=(*shape, geometry.head_dim)),
            PIVOT_ORDER: order,
            WATCHED: watched,
            **random_codebook(geometry, rng),
            **scorer_statistics(scorer, geometry, config["hidden_size"], rng),
        }
        path = self.folder / f"{model}-{scorer}-{segment}.safetensors"
        Profile(
            mu=(rng.uniform(0.05, 1.0, shape) ** 2).astype(np.float32),
            sigma=rng.uniform(0.0, 0.05, shape).astype(np.float32),
            model_id=folder.name,
            model_fingerprint=geometry.fingerprint,
            head_dim=geometry.head_dim,
            scorer=scorer,
            method="implied",
            scope="model",
            ratio=0.3,
            segment=segment,
            samples=1,
            statistics=MappingProxyType(
                {name: x if x.dtype == np.float16 else x.astype(np.float32) for name, x in statistics.items()}
            ),
        ).save(path)
        return path

    @functools.cache  # noqa: B019
    def adapters(self, model: str) -> tuple[Path, ...]:
        """Folders of random LoRA adapters of queries, keys, values and outputs."""
        config = json.loads((self.model(model) / "config.json").read_text())
        hidden, dim = config["hidden_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        shapes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
        made = []
        for number in range(ADAPTERS):
            rng, folder = np.random.default_rng([7, number]), self.folder / f"{model}-adapter-{number}"
            tensors = {}
            for layer in range(config["num_hidden_layers"]):
                for name, (inputs, outputs) in shapes.items():
                    start = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
                    tensors[f"{start}.lora_A.weight"] = (rng.normal(size=(RANK, inputs)) / inputs**0.5).astype("f4")
                    tensors[f"{start}.lora_B.weight"] = (0.3 * rng.normal(size=(outputs, RANK))).astype("f4")
            folder.mkdir()
            save_file(tensors, folder / "adapter_model.safetensors")
            about = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(self.model(model)),
                "r": RANK,
                "lora_alpha": RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": [f"{name}_proj" for name in shapes],
            }
            (folder / "adapter_config.json").write_text(json.dumps(about))
            made.append(folder)
        return tuple(made)


def random_codebook(geometry: ModelGeometry, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Queries that have a direction in common, 48 per query head, with logits that a model could have: of longer ones,
    some would attend to one token alone, and what is fitted to them would hang on its last bit."""
    shape, count, dim = (geometry.num_layers, geometry.num_heads), 48 * geometry.q_per_kv, geometry.head_dim
    frequencies = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    made = {
        QUERIES: 0.5 * rng.normal(size=(*shape, count, dim)) + 1,
        MASSES: rng.uniform(4, 7, size=(*shape, 2, count)),
        OUTPUTS: 0.2 * rng.normal(size=(*shape, 2, count, dim)),
        ROPE[0]: np.tile(frequencies, (shape[0], 1, 1)),
        ROPE[1]: np.tile(np.arange(dim), (shape[0], 1, 1)),
    }
    halves = (QUERIES, OUTPUTS)
    return {name: array.astype(np.float16 if name in halves else np.float32) for name, array in made.items()}


def scorer_statistics(
    scorer: str, geometry: ModelGeometry, hidden: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Make random statistics of a scorer: [layers, heads, ...], or [layers, 1, ...] where heads share them."""
    layers, heads, dim, group = geometry.num_layers, geometry.num_heads, geometry.head_dim, geometry.q_per_kv
    if scorer == "expected_attention":
        root = rng.normal(size=(layers, heads, group, dim, dim)) / dim**0.5
        frequencies = 10000.0 ** (-np.arange(0, dim, 2) / dim)
        return {
            "query_mean": rng.normal(size=(layers, heads, group, dim)),
            "query_covariance": root @ root.swapaxes(-1, -2),
            "rope_frequencies": np.broadcast_to(frequencies, (layers, 1, dim // 2)),
            "rope_order": np.broadcast_to(np.arange(dim), (layers, 1, dim)),
        }
    if scorer == "gate":
        neurons = 6
        return {
            "input_mean": rng.normal(size=(layers, 1, hidden)),
            "input_scale": rng.normal(size=(layers, 1, hidden)),
            "hidden": rng.normal(size=(layers, 1, neurons, hidden)),
            "hidden_bias": rng.normal(size=(layers, 1, neurons)),
            "skip": rng.normal(size=(layers, heads, hidden)),
            "output": rng.normal(size=(layers, heads, neurons)),
        }
    return {}

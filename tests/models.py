"""Small models and profiles that tests make for themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.storm.material import random_codebook
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.head_statistics import PIVOT_ORDER, WATCHED
from sgl_ragged.profiles.profile import VALUE_MEAN, Profile
from sgl_ragged.profiles.reference import LIKELIEST, ReferenceText

SIZES = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    max_position_embeddings=8192,
    rope_theta=5e5,
    bos_token_id=1,
    eos_token_id=2,
    # Ten times the usual spread: attention of such a model is far from uniform, so that a wrong mask shows.
    initializer_range=0.2,
)


def make_config(folder: Path) -> Path:
    """A Llama without weights, for what looks at the configuration alone: 3 layers of 4 KV heads."""
    sizes = SIZES | dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def make_llama(folder: Path, **more: object) -> Path:
    """A random Llama with 4 KV heads of dimension 64, 2 query heads each; `more` goes to its config."""
    sizes = SIZES | dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64) | more
    config = LlamaConfig(**sizes)
    return _save(LlamaForCausalLM, config, folder)


def make_qwen3(folder: Path, *, q_per_kv: int = 3, **more: object) -> Path:
    """A random Qwen3 (norms on queries and keys) with 2 KV heads of dimension 128; `more` goes to its config."""
    sizes = dict(num_hidden_layers=2, num_attention_heads=2 * q_per_kv, num_key_value_heads=2, head_dim=128)
    config = Qwen3Config(**(SIZES | sizes | more))
    return _save(Qwen3ForCausalLM, config, folder)


def _save(model_class: type, config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model_class(config).to(torch.float32).save_pretrained(folder)
    return folder


def make_profile(
    model: Path,
    path: Path,
    *,
    scorer: str = "keydiff",
    segment: int = 256,
    seed: int = 0,
    mu: np.ndarray | None = None,
    pivots: Sequence[tuple[int, int]] = (),
    codebook: bool = False,
) -> Profile:
    """A profile for `model` with strongly unequal head statistics, random unless `mu` is given, saved at `path`.

    pivots: layer and head of those that can watch, how well is random. codebook: whether there is one, of random
    queries that have a direction in common.
    """
    geometry = ModelGeometry.from_config(AutoConfig.from_pretrained(model).to_dict(), model.name)
    shape = (geometry.num_layers, geometry.num_heads)
    rng = np.random.default_rng(seed)
    order = np.full(shape, -1, np.float32)
    watched = np.zeros((*shape, len(pivots)), np.float32)
    for number, (layer, head) in enumerate(pivots):
        order[layer, head] = number
        watched[layer:, :, number] = np.random.default_rng([seed, number]).uniform(0.1, 1.0, watched[layer:].shape[:2])
    profile = Profile(
        mu=(rng.uniform(0.05, 1.0, shape) ** 2 if mu is None else mu).astype(np.float32),
        sigma=rng.uniform(0.0, 0.05, shape).astype(np.float32),
        model_id=model.name,
        model_fingerprint=geometry.fingerprint,
        head_dim=geometry.head_dim,
        scorer=scorer,
        method="implied",
        scope="model",
        ratio=0.3,
        segment=segment,
        samples=1,
        statistics=MappingProxyType(
            {VALUE_MEAN: 0.1 * rng.normal(size=(*shape, geometry.head_dim)).astype(np.float32)}
            | ({PIVOT_ORDER: order, WATCHED: watched} if pivots else {})
            | (random_codebook(geometry, rng) if codebook else {})
        ),
    )
    profile.save(path)
    return profile


@torch.no_grad()
def with_reference(profile: Profile, model: Path, path: Path, *, seed: int = 0) -> Profile:
    """The profile with what transformers' model predicts for three texts of random tokens, saved at `path`.

    seed: of the tokens.
    """
    made = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng, texts = np.random.default_rng(seed), []
    for name in ("first", "second", "third"):
        ids = rng.integers(3, 512, 5 * profile.segment + 1)
        every = made(torch.from_numpy(ids)[None]).logits[0, profile.segment : -1].log_softmax(-1)
        top = every.topk(LIKELIEST)
        own = every.gather(1, torch.from_numpy(ids[profile.segment + 1 :, None]))[:, 0]
        texts.append(
            ReferenceText(
                name, ids.astype(np.int32), own.numpy(), top.indices.numpy().astype(np.int32), top.values.half().numpy()
            )
        )
    profile = replace(profile, reference=tuple(texts))
    profile.save(path)
    return profile


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A random LoRA adapter of rank 4 on keys, values and queries of a Llama, large enough to change every answer."""
    config = AutoConfig.from_pretrained(model)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads["v_proj"] = heads["k_proj"]
    for layer in range(config.num_hidden_layers):
        for name, count in heads.items():
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (4, config.hidden_size)), ("B", (count * config.head_dim, 4))):
                tensors[f"{start}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(heads)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder

"""A model, and heads that draft as it answers: made by hand, so that most drafts are right without any training.

Its first layer does everything, the second adds nothing. Embeddings have unit mean squares, so norms in front of that
layer change nothing, and a head that has its weights computes what it computes. Heads are not quite right: they lack
the first token, see what slabs have dropped, and a little of the hidden states that they read is mixed in.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.draft_head import Head, make_head, read_behind
from tests.models import make_llama

LOUD = 10.0
"""Of what an EAGLE-3 head computes, beside the hidden states that it adds to."""

MIXED = {"eagle": 0.01, "eagle3": 0.01}
"""Standard deviation of weights on hidden states."""


def make_followed(folder: Path, head_dim: int = 64) -> Path:
    """The model: see above. Its even query heads are not heard, so that a head may use them for itself, if values are
    as large as embeddings."""
    make_llama(folder, num_hidden_layers=3, head_dim=head_dim)
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / embeddings.square().mean(-1, keepdim=True).sqrt()
    for layer in range(3):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"] *= 0.05 if name.endswith("o_proj") else 1.0
            if layer:
                weights[f"model.layers.{layer}.{name}.weight"].zero_()
    if head_dim == 64:
        heard = weights["model.layers.0.self_attn.o_proj.weight"].unflatten(1, (4, 2, 64))
        heard[:, :, 0].zero_()
        values = "model.layers.0.self_attn.v_proj.weight"
        weights[values] = torch.linalg.qr(weights[values]).Q.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_follower(model: Path, folder: Path, kind: str) -> Path:
    """A head for it."""
    make_head(model, folder, kind=kind)
    path, size = folder / "model.safetensors", 256
    head, weights, rng = load_file(path), load_file(model / "model.safetensors"), torch.Generator().manual_seed(1)
    own = {name.removeprefix("model.layers.0."): weight for name, weight in weights.items() if ".layers.0." in name}
    mixed = MIXED[kind] * torch.randn(head["fc.weight"].shape, generator=rng)
    if kind == "eagle":
        mixed[:, :size] = torch.eye(size)
        head |= {"fc.weight": mixed, "fc.bias": torch.zeros(size)}
        head |= {name: own[name.removeprefix("layers.0.")] for name in head if name.startswith("layers.0.")}
    else:
        keys, values = own["self_attn.k_proj.weight"], own["self_attn.v_proj.weight"]
        # Half of its query heads look at themselves, and bring back what values were made of: there is no other way
        # from embeddings to the output.
        queries, output = own["self_attn.q_proj.weight"].clone(), own["self_attn.o_proj.weight"].clone()
        queries.unflatten(0, (4, 2, 64))[:, 0] = keys.unflatten(0, (4, 64))
        output.unflatten(1, (4, 2, 64))[:, :, 0] = values.T.unflatten(1, (4, 64))
        own |= {"self_attn.q_proj.weight": queries, "self_attn.o_proj.weight": LOUD * output}
        own["mlp.down_proj.weight"] = LOUD * own["mlp.down_proj.weight"]
        nothing = torch.zeros_like(keys)
        for letter in "qkv":
            name = f"self_attn.{letter}_proj.weight"
            own[name] = torch.cat((own[name], nothing.repeat(len(own[name]) // len(nothing), 1)), 1)
        head |= {name: own[name.removeprefix("midlayer.")] for name in head if name.removeprefix("midlayer.") in own}
        head |= {"fc.weight": mixed, "lm_head.weight": weights["lm_head.weight"]}
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_output": True}))
    save_file({name: weight.contiguous() for name, weight in head.items()}, path, metadata={"format": "pt"})
    return folder


def make_mtp(folder: Path) -> Path:
    """A like model as a MiMo, whose checkpoint has a layer that drafts beside its own (`models/mimo_mtp.py`)."""
    weights = load_file(make_followed(folder, head_dim=32) / "model.safetensors")
    for layer in range(3):
        for letter in "qkv":
            name = f"model.layers.{layer}.self_attn.{letter}_proj"
            weights[f"{name}.bias"] = torch.zeros(len(weights[f"{name}.weight"]))
    own = "model.mtp_layers.0."
    first = {name.replace("model.layers.0.", own): weight for name, weight in weights.items() if ".layers.0." in name}
    ones, identity = torch.ones(256), torch.eye(256)
    mixed = 0.01 * torch.randn((256, 256), generator=torch.Generator().manual_seed(1))
    weights |= {name: weight.clone() for name, weight in first.items()}
    weights |= {f"{own}{name}_layernorm.weight": ones.clone() for name in ("token", "hidden", "final")}
    weights[f"{own}input_proj.weight"] = torch.cat((mixed, identity), 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    more = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


@torch.no_grad()
def drafted_per_step(
    model_folder: Path, folder: Path, kind: str, prompt: list[int], answer: list[int], width: int, segment: int
) -> float:
    """Tokens that steps give by the model's hidden states and the head in torch, as SGLang counts them.

    Everything is computed anew at each step, without any cache; nothing is compressed, so sequences must be shorter
    than a segment.
    """
    assert len(prompt) + len(answer) < segment, "chains would end at a border"
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    config, layers = AutoConfig.from_pretrained(folder), read_behind(model.config.num_hidden_layers)
    config._attn_implementation = "sdpa"
    head = Head(config, kind, len(layers), config.vocab_size, model.get_input_embeddings())
    names = {name: weight for name, weight in load_file(folder / "model.safetensors").items() if name != "d2t"}
    first = "layers.0." if kind == "eagle" else "midlayer."
    head.load_state_dict({name.replace(first, "layer."): weight for name, weight in names.items()})
    output = model.get_output_embeddings() if kind == "eagle" else head.lm_head
    tokens = torch.tensor([prompt + answer])
    states = model(tokens, output_hidden_states=True).hidden_states
    hidden = states[-1] if kind == "eagle" else torch.cat([states[layer + 1] for layer in layers], -1)
    if kind == "eagle3":
        hidden = head.fc(hidden)
    known, steps = len(prompt) + 1, 0
    while known < tokens.shape[1]:
        following, read = tokens[:, 1:known], hidden[:, : known - 1]
        for _ in range(width - 1):
            said, own = head(following, read)
            following = torch.cat((following, output(said[:, -1:]).argmax(-1)), 1)
            read = torch.cat((read, (own if kind == "eagle" else said)[:, -1:]), 1)
        drafts, wanted = following[0, known - 1 :].tolist(), tokens[0, known : known + width - 1].tolist()
        right = next((i for i, pair in enumerate(zip(drafts, wanted, strict=False)) if len(set(pair)) > 1), len(wanted))
        known, steps = known + right + 1, steps + 1
    return len(answer) / steps

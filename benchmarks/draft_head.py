"""A head that drafts from a model's hidden states, EAGLE or EAGLE-3: random, or trained on the model's own answers.

    python -m benchmarks draft_head --model FOLDER --output FOLDER [--kind eagle3] [--trained 300] [--texts FILE ...]

A random head is nearly never right, which is what tests of wrong drafts want. `--trained STEPS` lets the model answer
prompts greedily, of random tokens or cut from text files, and trains the head to say the same tokens: minutes on a
CPU for a model of 100 million parameters. How it is read: `--speculative-algorithm EAGLE` or `EAGLE3`,
`--speculative-draft-model-path FOLDER`, `--speculative-eagle-topk 1`, `--speculative-num-steps N`.

Both kinds are as SGLang reads them (`models/llama_eagle.py`, `llama_eagle3.py` there), after
https://arxiv.org/abs/2401.15077 and https://arxiv.org/abs/2503.01840: at a token the head sees its hidden state and
the embedding of the next one, and has one layer. EAGLE reads what goes into the model's output and takes embeddings and
output from the model; EAGLE-3 reads behind some layers, and has an output of its own, for `--draft-vocab` tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.harness.command import command
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import check_new_folder
from benchmarks.harness.options import new_parser

KINDS = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
"""Architectures, by SGLang's names."""

LOOKS_AHEAD = 3
"""Drafts behind each token that a head is trained on: all but the first are made from its own hidden states."""

CHUNK = 8
"""Sequences of one step of training, and prompts that are answered at once."""


def read_behind(num_layers: int) -> list[int]:
    """Layers of the model behind which an EAGLE-3 head reads: early, in the middle, late."""
    return sorted({min(1, num_layers - 2), (num_layers - 2) // 2, num_layers - 2})


@dataclass(frozen=True)
class Sequences:
    """Of the model: tokens and the one that it says behind each, int64 [sequences, tokens]; hidden states, [sequences,
    tokens, what a head reads]."""

    tokens: torch.Tensor
    said: torch.Tensor
    hidden: torch.Tensor


class Head(nn.Module):
    """See above; `config` is the head's, with the sizes of the model's layers."""

    def __init__(self, config: Any, kind: str, reads: int, draft_vocab: int, embeddings: nn.Embedding) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.kind, size = kind, config.hidden_size
        self._embeddings = [embeddings]
        self.rotary = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, 0)
        if kind == "eagle":
            self.fc = nn.Linear(2 * size, size)
            self.layer.input_layernorm = nn.Identity()
            return
        self.fc = nn.Linear(reads * size, size, bias=False)
        for name in "qkv":
            old = getattr(self.layer.self_attn, f"{name}_proj")
            setattr(self.layer.self_attn, f"{name}_proj", nn.Linear(2 * size, old.out_features, bias=False))
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_vocab, bias=False)

    def forward(self, following: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output is made of, and what the head reads in place of hidden states at the next step.

        Args:
            following: int64 [sequences, tokens], the next token of each. hidden: [sequences, tokens, ...].
        """
        embedded = self._embeddings[0](following)
        at = torch.arange(following.shape[1])[None]
        places = self.rotary(embedded, at)
        if self.kind == "eagle":
            found = self.layer(self.fc(torch.cat((embedded, hidden), -1)), position_embeddings=places)
            return found, found
        if hidden.shape[-1] != embedded.shape[-1]:
            hidden = self.fc(hidden)
        both = torch.cat((self.layer.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        found = hidden + self.layer.self_attn(both, position_embeddings=places, attention_mask=None)[0]
        found = found + self.layer.mlp(self.layer.post_attention_layernorm(found))
        return self.norm(found), found

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Its weights by SGLang's names."""
        layer = "layers.0" if self.kind == "eagle" else "midlayer"
        named = {name.replace("layer.", f"{layer}.", 1): weight for name, weight in self.state_dict().items()}
        return {name: weight.detach().contiguous() for name, weight in named.items()}


def head_config(model: Any, kind: str, draft_vocab: int, layers: Sequence[int]) -> Any:
    """Make the configuration of a head for a model with this configuration."""
    from transformers import LlamaConfig

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    same = {name: getattr(model, name) for name in (*sizes, "max_position_embeddings", "rms_norm_eps")}
    given = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    more: dict[str, Any] = {}
    if kind == "eagle3":
        more = {"draft_vocab_size": draft_vocab, "target_hidden_size": model.hidden_size}
        more["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(layers)}
    return LlamaConfig(
        **same,
        head_dim=given,
        num_hidden_layers=1,
        rope_parameters=model.rope_parameters,
        initializer_range=model.initializer_range,
        tie_word_embeddings=False,
        architectures=[KINDS[kind]],
        attn_implementation="sdpa",
        **more,
    )


@torch.no_grad()
def answer(model: Any, kind: str, layers: Sequence[int], prompts: torch.Tensor, new: int) -> Sequences:
    """Prompts with `new` tokens of greedy answers."""
    tokens = prompts
    if new:
        mask, lengths = torch.ones_like(prompts), {"max_new_tokens": new, "min_new_tokens": new}
        tokens = model.generate(prompts, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    found = model(tokens, output_hidden_states=True)
    states = found.hidden_states
    # Behind the last layer they are normalised, as SGLang hands them over.
    hidden = states[-1] if kind == "eagle" else torch.cat([states[layer + 1] for layer in layers], -1)
    return Sequences(tokens, found.logits.argmax(-1), hidden)


def train(head: Head, output: nn.Module, data: Sequences, ids: torch.Tensor, steps: int, rng: torch.Generator) -> float:
    """Train in place; returns the share of first drafts that are right in the last tenth of the steps.

    output: of the model, for heads without one. ids: int64 [draft vocabulary], the tokens that a head can say.
    """
    # What it cannot say counts for nothing.
    place = torch.full((int(max(ids.max(), data.said.max())) + 1,), -100)
    place[ids] = torch.arange(len(ids))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    right: list[float] = []
    for _ in range(steps):
        chosen = torch.randint(len(data.tokens), (CHUNK,), generator=rng)
        tokens, said, hidden = data.tokens[chosen], place[data.said[chosen]], data.hidden[chosen]
        loss = torch.zeros(())
        for ahead in range(min(LOOKS_AHEAD, tokens.shape[1] - 2)):
            # At each token the next one is known, and the one behind that is drafted.
            following, wanted = tokens[:, 1 + ahead : -1], said[:, 1 + ahead : -1]
            last, hidden = head(following, hidden[:, : following.shape[1]])
            logits = output(last) if head.kind == "eagle" else head.lm_head(last)
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            if ahead == 0:
                right.append(float((logits.argmax(-1) == wanted).float().mean()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    last = right[-max(len(right) // 10, 1) :]
    return sum(last) / len(last)


def make_prompts(
    model: Path, vocabulary: int, count: int, length: int, texts: Sequence[Path], seed: int
) -> torch.Tensor:
    """int64 [count, length]: cut from texts, or of random tokens."""
    rng = torch.Generator().manual_seed(seed)
    if not texts:
        return torch.randint(vocabulary, (count, length), generator=rng)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = torch.tensor([token for text in texts for token in tokenizer(text.read_text())["input_ids"]])
    if len(found) < length:
        raise SettingsError(f"--texts have {len(found)} tokens, and a prompt {length}")
    starts = torch.randint(len(found) - length + 1, (count,), generator=rng)
    return torch.stack([found[start : start + length] for start in starts.tolist()])


def make_head(
    model_folder: Path,
    folder: Path,
    *,
    kind: str = "eagle",
    steps: int = 0,
    sequences: int = 64,
    prompt: int = 16,
    new: int = 112,
    texts: Sequence[Path] = (),
    draft_vocab: int | None = None,
    seed: int = 0,
) -> float | None:
    """Write a head's folder, in the model's dtype; returns the share of right drafts if it was trained.

    Args:
        steps: of training; 0 for a random head. sequences, prompt, new: what it is trained on, as counts of sequences
            and of their tokens. draft_vocab: tokens that an EAGLE-3 head can say, the most frequent of the answers.

    Raises:
        SettingsError: the model has too few layers for the kind, or the vocabulary is larger than the model's.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval()
    dtype, vocabulary = model.dtype, model.config.vocab_size
    layers = read_behind(model.config.num_hidden_layers)
    if kind == "eagle3" and len(layers) < 2:
        raise SettingsError(f"an EAGLE-3 head reads behind two layers at least; {model_folder} has too few")
    said = vocabulary if draft_vocab is None else draft_vocab
    if not 0 < said <= vocabulary:
        raise SettingsError(f"--draft-vocab {said} must be at least 1, and at most the model's {vocabulary}")
    config = head_config(model.config, kind, said, layers)
    model = model.float().requires_grad_(False)
    head = Head(config, kind, len(layers), said, model.get_input_embeddings())
    ids, right = torch.arange(said), None
    if not steps:
        for weight in head.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=config.initializer_range)
    else:
        prompts = make_prompts(model_folder, vocabulary, sequences, prompt, texts, seed)
        made = [answer(model, kind, layers, part, new) for part in prompts.split(CHUNK)]
        data = Sequences(*(torch.cat([getattr(one, name) for one in made]) for name in ("tokens", "said", "hidden")))
        often = data.said.flatten().bincount(minlength=vocabulary).argsort(descending=True, stable=True)
        ids = often[:said].sort().values
        rng = torch.Generator().manual_seed(seed)
        right = train(head, model.get_output_embeddings(), data, ids, steps, rng)
    weights = {name: weight.to(dtype) for name, weight in head.checkpoint().items()}
    if kind == "eagle3":
        weights["d2t"] = ids - torch.arange(said)
    config.dtype = dtype
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return right


def main() -> None:
    parser = new_parser("draft_head", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder")
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--kind", choices=tuple(KINDS), default="eagle", help="[eagle]")
    parser.add_argument("--trained", type=int, default=0, metavar="STEPS", help="0: random weights [0]")
    parser.add_argument("--sequences", type=int, default=64, help="to train on [64]")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each that are given [16]")
    parser.add_argument("--new", type=int, default=112, help="tokens of each that it answers [112]")
    parser.add_argument("--texts", type=Path, nargs="*", default=(), help="files that prompts are cut from")
    parser.add_argument("--draft-vocab", type=int, help="tokens that an EAGLE-3 head can say [all]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    options = parser.parse_args()
    with command("draft_head"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Check the options, write the head and say so. Raises SettingsError."""
    if min(options.sequences, options.prompt) < 1 or min(options.new, options.trained) < 0:
        raise SettingsError("sizes must be at least 1, and --new and --trained at least 0")
    check_new_folder(options.output)
    names = ("kind", "sequences", "prompt", "new", "texts", "draft_vocab", "seed")
    sizes = {name: getattr(options, name) for name in names}
    right = make_head(options.model, options.output, steps=options.trained, **sizes)
    trained = "random" if right is None else f"{right:.0%} of first drafts right at the end of training"
    print(f"{options.output}: {KINDS[options.kind]}, {trained}")


if __name__ == "__main__":
    main()

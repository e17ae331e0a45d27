"""The model's last matrix: from the hidden states that a server returns to next-token distributions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.harness.errors import BenchmarkError

NAMES = ("lm_head.weight", "model.embed_tokens.weight")
"""Names of the matrix in a checkpoint. A model without a matrix of its own uses that of its embeddings."""

BLOCK = 128
"""Positions whose distributions are held at a time."""


class HeadMissing(BenchmarkError):
    """The checkpoint has no such matrix under a known name."""


def load_head(model: Path) -> torch.Tensor:
    """float32 [vocabulary, hidden size]. Raises HeadMissing."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(str(model / "model.safetensors"), framework="pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    for name in NAMES:
        if name in files:
            with safe_open(str(model / files[name]), framework="pt") as file:
                return file.get_tensor(name).float()
    raise HeadMissing(f"{model} has none of {', '.join(NAMES)}: its distributions cannot be computed")


def head_dim(model: Path) -> int:
    """Return the number of channels of one attention head, by the model's configuration."""
    config = json.loads((model / "config.json").read_text())
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


@dataclass(frozen=True)
class Difference:
    """Two runs over one text, compared at every position but the last: float32 [tokens - 1] each.

    nll: minus the log-probability of the token that follows; reference_nll: the same by the reference.
    kl: Kullback-Leibler divergence of the reference's next-token distribution from this one, in nats.
    agrees: 1 where both have the same most likely token, else 0.
    """

    nll: torch.Tensor
    reference_nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor

    def means(self) -> dict[str, float]:
        """kl, agrees and delta_nll, which is nll more than reference_nll: means over the positions."""
        found = {"kl": self.kl, "delta_nll": self.nll - self.reference_nll, "agrees": self.agrees}
        return {name: float(values.mean()) for name, values in found.items()}


def compare(head: torch.Tensor, reference: torch.Tensor, found: torch.Tensor, ids: torch.Tensor) -> Difference:
    """Compare two runs over the same tokens.

    Args:
        head: [vocabulary, hidden size].
        reference, found: [tokens, hidden size], what enters the head.
        ids: int64 [tokens].
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(ids) - 1, BLOCK):
        stop = min(start + BLOCK, len(ids) - 1)
        want, have = ((states[start:stop].float() @ head.T).log_softmax(dim=-1) for states in (reference, found))
        following = ids[start + 1 : stop + 1, None]
        parts.append(
            (
                -have.gather(1, following)[:, 0],
                -want.gather(1, following)[:, 0],
                (want.exp() * (want - have)).sum(dim=-1),
                (want.argmax(dim=-1) == have.argmax(dim=-1)).float(),
            )
        )
    return Difference(*(torch.cat(column) for column in zip(*parts, strict=True)))

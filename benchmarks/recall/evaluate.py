"""Measure the recall model: `python -m benchmarks recall.evaluate [--checkpoint DIR] [--json FILE]`.

Recall by kind of fact, length and style of document, and the share of far attention of every head where an answer is
due, which shows whether heads specialise. All in float32 with full attention.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.options import new_parser
from benchmarks.harness.table import Table
from benchmarks.recall import task

CHECKPOINT = Path(__file__).parent / "checkpoint"
LENGTHS = (384, 1024, 2048, 4096)
TOKENS_PER_CELL = 24_576  # documents of one length and style, in tokens
HELD_OUT_SEED = 2**32  # training seeds are smaller
FAR_LENGTH = 2048  # documents over which far attention is measured, in tokens

Report = dict[str, Any]

NEAR = 64
SINKS = 4
"""Far is what is neither near (the last `NEAR` tokens up to the query) nor one of the first `SINKS` tokens."""

IMPLEMENTATION = "recall_far_attention"


@dataclass
class Probe:
    """Asks for far attention at ``positions`` [batch, probes] int64; the layers append to ``shares`` in their order."""

    positions: Tensor
    shares: list[Tensor] = field(default_factory=list)

    def by_layer(self) -> Tensor:
        """Share of attention on far tokens, [layers, batch, query heads, probes] in 0..1."""
        return torch.stack(self.shares)


def far_share(query: Tensor, key: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Share of attention on far tokens, [batch, heads, probes] in 0..1.

    query and key [batch, heads, T, head_dim] after RoPE, positions [batch, probes] int64 of the queries to look at.
    """
    batch, heads, length, head_dim = query.shape
    index = positions[:, None, :, None].expand(batch, heads, -1, head_dim)
    logits = query.gather(2, index) @ key.transpose(2, 3) * scale
    distance = (positions[:, :, None] - torch.arange(length))[:, None]  # [batch, 1, probes, T]
    weights = logits.masked_fill(distance < 0, float("-inf")).softmax(dim=-1)
    far = distance >= NEAR
    far[..., :SINKS] = False
    return (weights * far).sum(dim=-1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    probe: Probe | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [batch, query heads, T, d], key and value by KV head."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if probe is not None:
        probe.shares.append(far_share(query, key, probe.positions, scaling))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def load_model(checkpoint: Path) -> Any:
    """Load the saved model in float32, with attention that can be probed."""
    from transformers import AttentionInterface, LlamaForCausalLM

    AttentionInterface.register(IMPLEMENTATION, _attention)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.set_attn_implementation(IMPLEMENTATION)
    return model.eval()


@torch.inference_mode()
def ask(model: Any, talk: task.Conversation) -> tuple[np.ndarray, np.ndarray]:
    """Whether each turn's answer is right [turns] bool; far attention where it is due [layers, query heads, turns]."""
    ids = torch.from_numpy(task.render(talk))
    due = (ids == task.TOKEN_ID[task.ASSISTANT]).nonzero().flatten()
    probe = Probe(due[None])
    logits = model(ids[None], use_cache=False, probe=probe).logits[0]
    return (logits[due].argmax(-1) == ids[due + 1]).numpy(), probe.by_layer()[:, 0].numpy()


def evaluate(model: Any) -> Report:
    """Recall and far attention over held-out documents; plain numbers, ready for JSON."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    recall, shares = [], []
    for style in task.STYLES:
        for length in LENGTHS:
            right: dict[str, list[bool]] = {kind: [] for kind in task.KINDS}
            for _ in range(TOKENS_PER_CELL // length):
                talk = task.document_conversation(rng, length, style)
                correct, far = ask(model, talk)
                for turn, answer in zip(talk.turns, correct, strict=True):
                    right[turn.asked.kind].append(bool(answer))
                if length == FAR_LENGTH:
                    shares.append(far)
            right["all"] = [answer for answers in right.values() for answer in answers]
            recall.append({"style": style, "length": length, **{kind: _rate(right[kind]) for kind in right}})
    far_share = np.concatenate(shares, axis=-1).mean(-1)
    by_kv_head = far_share.reshape(far_share.shape[0], model.config.num_key_value_heads, -1).max(-1)
    return {
        "recall": recall,
        "far_attention": {
            "document_tokens": FAR_LENGTH,
            "by_query_head": far_share.round(4).tolist(),
            "by_kv_head": by_kv_head.round(4).tolist(),
        },
    }


def _rate(right: list[bool]) -> dict[str, float]:
    """Mean, its standard error (Agresti-Coull, so that it is not 0 at a mean of 1) and the number of questions."""
    count = len(right)
    adjusted = (sum(right) + 2) / (count + 4)
    error = math.sqrt(adjusted * (1 - adjusted) / (count + 4))
    return {"mean": round(sum(right) / count, 4), "error": round(error, 4), "questions": count}


def print_report(report: Report, console: Console) -> None:
    """Print recall and far attention as tables."""
    kinds = (*task.KINDS, "all")
    rows = [
        [row["style"], str(row["length"]), *("{mean:.3f} ({error:.3f}, {questions})".format(**row[k]) for k in kinds)]
        for row in report["recall"]
    ]
    Table("recall (standard error, questions)", ("style", "length", *kinds), rows).show(console)
    shares = report["far_attention"]["by_kv_head"]
    rows = [[str(layer), *(f"{share:.2f}" for share in row)] for layer, row in enumerate(shares)]
    title = "share of far attention at questions, the larger of the KV head's two query heads"
    Table(title, ("layer", *(f"head {i}" for i in range(len(shares[0])))), rows).show(console)


def main() -> None:
    """Measures the checkpoint, prints the tables and writes JSON where asked."""
    parser = new_parser("recall.evaluate", __doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()
    report = evaluate(load_model(args.checkpoint))
    print_report(report, Console())
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

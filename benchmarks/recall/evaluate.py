"""Measures the recall model: ``python -m benchmarks.recall.evaluate [--checkpoint DIR] [--json FILE]``.

Recall by kind of fact, length and style of document, and the share of far attention of every head where an answer is
due, which shows whether heads specialise. All in float32 with full attention.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from benchmarks.recall import task
from benchmarks.recall.far_attention import IMPLEMENTATION, Probe

CHECKPOINT = Path(__file__).parent / "checkpoint"
LENGTHS = (384, 1024, 2048, 4096)
TOKENS_PER_CELL = 24_576  # documents of one length and style, in tokens
HELD_OUT_SEED = 2**32  # training seeds are smaller
FAR_LENGTH = 2048  # documents over which far attention is measured, in tokens

Report = dict[str, object]


def load_model(checkpoint: Path) -> LlamaForCausalLM:
    """The saved model in float32, with attention that can be probed."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.set_attn_implementation(IMPLEMENTATION)
    return model.eval()


@torch.inference_mode()
def ask(model: LlamaForCausalLM, talk: task.Conversation) -> tuple[np.ndarray, np.ndarray]:
    """Whether each turn's answer is right [turns] bool; far attention where it is due [layers, query heads, turns]."""
    ids = torch.from_numpy(task.render(talk)[0])
    due = (ids == task.TOKEN_ID[task.ASSISTANT]).nonzero().flatten()
    probe = Probe(due[None])
    logits = model(ids[None], use_cache=False, probe=probe).logits[0]
    return (logits[due].argmax(-1) == ids[due + 1]).numpy(), probe.by_layer()[:, 0].numpy()


def evaluate(model: LlamaForCausalLM) -> Report:
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
    """Prints recall and far attention as tables."""
    table = Table(title="recall (standard error, questions)")
    for column in ("style", "length", *task.KINDS, "all"):
        table.add_column(column, justify="left" if column == "style" else "right")
    for row in report["recall"]:
        cells = [f"{row[k]['mean']:.3f} ({row[k]['error']:.3f}, {row[k]['questions']})" for k in (*task.KINDS, "all")]
        table.add_row(row["style"], str(row["length"]), *cells)
    console.print(table)
    shares = report["far_attention"]["by_kv_head"]
    table = Table(title="share of far attention at questions, the larger of the KV head's two query heads")
    for column in ("layer", *(f"head {i}" for i in range(len(shares[0])))):
        table.add_column(column, justify="right")
    for layer, row in enumerate(shares):
        table.add_row(str(layer), *(f"{share:.2f}" for share in row))
    console.print(table)


def main() -> None:
    """Measures the checkpoint, prints the tables and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()
    report = evaluate(load_model(args.checkpoint))
    print_report(report, Console())
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

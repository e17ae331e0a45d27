"""Trains the recall model from scratch on CPU: ``python -m benchmarks.recall.train [--seed 0] [--out DIR] [--quick]``.

Curriculum: repeated random strings until the induction circuit stands, then recall documents of growing length, each
until it is mastered. In the last stages, over which the learning rate falls, attention on far tokens has a price, from
cheap to dear over the KV heads of each layer, so that heads within a layer come to differ as sharply as they do in
large models. The price exists in training only: what is saved is a plain LlamaForCausalLM.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.recall import task
from benchmarks.recall.evaluate import CHECKPOINT, evaluate, load_model, print_report
from benchmarks.recall.far_attention import IMPLEMENTATION, Probe
from benchmarks.recall.initial import initial_model
from benchmarks.recall.muon import Muon
from benchmarks.recall.tokenizer import build_tokenizer

MATRIX_RATE, OTHER_RATE = 0.02, 3e-3  # peak learning rates of Muon and AdamW
WARM_UP_STEPS = 30
FINAL_RATE = 0.05  # share of the peak at the last step
PROBES = 64  # queries per document at which far attention is measured, half of them at answers
PRICE = 1.0
CHEAPEST, DEAREST = 0.05, 1.0
CHARGED_ABOVE = 0.9  # running recall from which the price is charged, in full at 1


@dataclass(frozen=True)
class Stage:
    """Batches of ``tokens // length`` documents: 'strings' are repeated strings, 'recall' is the task.

    Ends after ``steps`` batches, or sooner where the running recall reaches ``until``. In a ``final`` stage far
    attention has its price and the learning rate falls.
    """

    name: str
    length: int
    steps: int
    tokens: int = 2048
    until: float = math.inf
    final: bool = False


LEARN = (
    Stage("strings", 64, 600, until=0.9),
    Stage("recall", 64, 300, until=0.95),
    Stage("recall", 128, 200, until=0.95),
    Stage("recall", 256, 200, until=0.95),
    Stage("recall", 512, 200, until=0.95),
)
FULL = (
    *LEARN,
    Stage("recall", 512, 100, final=True),
    Stage("recall", 1024, 80, tokens=4096, final=True),
    Stage("recall", 2048, 100, tokens=4096, final=True),
    Stage("recall", 4096, 30, tokens=4096, final=True),
)
QUICK = (*LEARN[:-1], Stage("recall", 384, 60, final=True))


def model_config() -> LlamaConfig:
    """The architecture. Tied embeddings let one copying circuit serve every word, which a recall task lives on."""
    return LlamaConfig(
        vocab_size=len(task.VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=task.TOKEN_ID[task.BOS],
        eos_token_id=task.TOKEN_ID[task.EOS],
        pad_token_id=task.TOKEN_ID[task.PAD],
    )


def head_prices(config: LlamaConfig, seed: int) -> Tensor:
    """Price of far attention [layers, KV heads] float32: each layer has the same prices in an order of its own."""
    rng = np.random.default_rng(seed)
    prices = np.geomspace(CHEAPEST, DEAREST, config.num_key_value_heads)
    return torch.tensor(np.stack([rng.permutation(prices) for _ in range(config.num_hidden_layers)]), dtype=torch.float)


def draw_batch(rng: np.random.Generator, stage: Stage) -> tuple[Tensor, Tensor]:
    """Token ids [batch, length] int64 and loss weights [batch, length] float32."""
    documents = []
    for i in range(stage.tokens // stage.length):
        if stage.name == "strings":
            documents.append(task.repeated_string(rng, stage.length))
        else:
            documents.append(task.document(rng, stage.length, task.STYLES[i % 2 if i else int(rng.integers(2))]))
    ids, weights = (np.stack(arrays) for arrays in zip(*documents, strict=True))
    return torch.from_numpy(ids), torch.from_numpy(weights)


def draw_probes(rng: np.random.Generator, ids: Tensor) -> Tensor:
    """Query positions [batch, PROBES] int64: half where an answer is due, half anywhere."""
    due = (ids == task.TOKEN_ID[task.ASSISTANT]).numpy()
    rows = [
        np.concatenate([rng.choice(np.flatnonzero(row), PROBES // 2), rng.integers(row.size, size=PROBES // 2)])
        for row in due
    ]
    return torch.from_numpy(np.stack(rows))


def price_of(shares: Tensor, prices: Tensor) -> Tensor:
    """What the far attention ``shares`` [layers, batch, query heads, probes] costs, a scalar in 0..1.

    The square root is concave, so a few heads that look far are cheaper than many that do so a little.
    """
    by_head = shares.mean(dim=(1, 3)).unflatten(1, (prices.shape[1], -1)).mean(dim=2)
    return (prices * ((by_head + 1e-3).sqrt() - 1e-3**0.5)).mean()


def rate_factor(step: int, final_step: int, final_total: int) -> float:
    """Learning rate as a share of its peak, after ``final_step`` of ``final_total`` steps of the final stages."""
    cosine = 0.5 * (1 + math.cos(math.pi * final_step / final_total))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def train(stages: tuple[Stage, ...], seed: int, console: Console) -> tuple[LlamaForCausalLM, list[dict[str, object]]]:
    """Trains a fresh model; same seed, machine and thread count, same model. Also returns what each stage took."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = initial_model(model_config())
    model.set_attn_implementation(IMPLEMENTATION)
    prices = head_prices(model.config, seed)
    matrices = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]
    optimizers = (
        Muon(matrices, lr=MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), fused=True),
    )
    total = sum(stage.steps for stage in stages)
    final_total = sum(stage.steps for stage in stages if stage.final)
    steps = final_steps = 0
    history: list[dict[str, object]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=total)
        for stage in stages:
            recall = 0.0
            start = time.perf_counter()
            for step in range(stage.steps):
                ids, weights = draw_batch(rng, stage)
                probe = Probe(draw_probes(rng, ids)) if stage.final else None
                logits = model(ids, use_cache=False, probe=probe).logits[:, :-1]
                losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
                loss = (losses * weights[:, 1:]).sum() / weights.sum()
                scored = weights[:, 1:] == task.ANSWER_WEIGHT
                if stage.name == "recall":
                    scored &= ids[:, :-1] == task.TOKEN_ID[task.ASSISTANT]
                right = (logits.argmax(-1) == ids[:, 1:])[scored].float().mean().item()
                recall += (right - recall) * max(0.05, 1 / (step + 1))
                price = 0.0
                if probe is not None:
                    charge = price_of(probe.by_layer(), prices)
                    price = charge.item()
                    loss = loss + PRICE * max(0.0, (recall - CHARGED_ABOVE) / (1 - CHARGED_ABOVE)) * charge
                model.zero_grad()
                loss.backward()
                factor = rate_factor(steps, final_steps, final_total)
                for optimizer, peak in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
                    optimizer.param_groups[0]["lr"] = peak * factor
                    optimizer.step()
                steps += 1
                final_steps += stage.final
                text = f"{stage.name} {stage.length:>4}  recall {recall:.3f}  price {price:.3f}"
                progress.update(bar, advance=1, description=text)
                if not console.is_terminal and step % 25 == 24:
                    console.print(f"{text}  {(time.perf_counter() - start) / (step + 1):.2f} s/step")
                if recall >= stage.until:
                    break
            seconds = round(time.perf_counter() - start)
            console.print(f"{text}  loss {loss.item():.3f}  {seconds} s")
            outcome = {"steps": step + 1, "recall": round(recall, 4), "seconds": seconds}
            history.append({"name": stage.name, "length": stage.length, "tokens_per_step": stage.tokens, **outcome})
            total += step + 1 - stage.steps
            progress.update(bar, total=total)
    return model, history


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Writes bf16 weights, configuration, generation defaults and tokenizer."""
    config = model.config
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)
    build_tokenizer(config.max_position_embeddings).save_pretrained(out)


def main() -> None:
    """Trains, saves, measures what was saved and records both beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--quick", action="store_true", help="short documents only: enough to see that it learns")
    args = parser.parse_args()
    console = Console()
    stages = QUICK if args.quick else FULL
    start = time.perf_counter()
    model, history = train(stages, args.seed, console)
    minutes = (time.perf_counter() - start) / 60
    save(model, args.out)
    report = evaluate(load_model(args.out))
    print_report(report, console)
    record = {
        "seed": args.seed,
        "steps": sum(stage["steps"] for stage in history),
        "tokens": sum(stage["steps"] * stage["tokens_per_step"] for stage in history),
        "stages": history,
        "price": {"weight": PRICE, "cheapest": CHEAPEST, "dearest": DEAREST, "charged_above": CHARGED_ABOVE},
        "wall_minutes": round(minutes, 1),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "measured": report,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What it would lose, and save, to hold full blocks of open segments in 8 bits. Nothing of it is built.

    python -m benchmarks.open_blocks --model models/smollm2-135m [--output open-blocks.json]

A block is full once its last token is there: a rule by position, so keys and values stay functions of the tokens. Each
query sees its own block and all sealed segments as they are, and earlier blocks of its segment rounded as slabs of
format int8 are. KL divergence of the next token's distribution from the model's, over the texts of `quality`.

Bytes are arithmetic, for a head_dim of 128 in 16 bits: of requests that may end anywhere in a segment of 256 tokens,
sealed tokens at the ratio, blocks of 32 open tokens, the last of them uncompressed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.rows import Rows
from benchmarks.quality.texts import SOURCES, pieces
from sgl_ragged.mem_pool.quantise import QuantisedRows, stored_rows
from sgl_ragged.mem_pool.slab_format import FORMATS

NAME, SEGMENT, BLOCK, DIM = "rounded_open_blocks", 256, 32, 128
RATIOS, LENGTHS = (0.3, 0.2, 0.1), (256, 1024, 4096)


def rounded(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., tokens, head_dim] as slabs of format int8 hold them."""
    form, (kept, dim) = FORMATS["int8"], keys.shape[-2:]
    back_keys, back_values = QuantisedRows.of(stored_rows(keys, values, form), kept, dim, form).restored()
    return back_keys.to(keys.dtype), back_values.to(values.dtype)


def as_they_are(tokens: int, block: int) -> torch.Tensor:
    """bool [queries, keys]: pairs in one block, or in different segments; a block of 0 tokens rounds nothing."""
    places = torch.arange(tokens)
    if not block:
        return torch.ones(tokens, tokens, dtype=torch.bool)
    one_block = places[:, None] // block == places // block
    return one_block | (places[:, None] // SEGMENT != places // SEGMENT)


def attention(block: int) -> Any:
    """An attention function of transformers: dense, causal."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
        every = [x.repeat_interleave(groups, dim=1) for x in (key, value, *rounded(key, value))]
        exact, causal = as_they_are(tokens, block), torch.ones(tokens, tokens, dtype=torch.bool).tril()
        logits = torch.where(exact, query @ every[0].transpose(2, 3), query @ every[2].transpose(2, 3)) * scaling
        weights = logits.masked_fill(~causal, -torch.inf).softmax(dim=-1)
        output = weights.masked_fill(~exact, 0) @ every[1] + weights.masked_fill(exact, 0) @ every[3]
        return output.transpose(1, 2), None

    return attend


def divergences(folder: Path, blocks: list[int], length: int) -> dict[int, list[float]]:
    """Mean KL divergence of each text, by tokens of a block."""
    # Seconds, which the report does without.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[int, list[float]] = {block: [] for block in blocks}
    for text in pieces(tokenizer, length, 1, tuple(SOURCES)):
        ids, logs = torch.tensor([text.ids]), {}
        for block in (0, *blocks):
            ALL_ATTENTION_FUNCTIONS.register(NAME, attention(block))
            model.set_attn_implementation(NAME)
            with torch.inference_mode():
                logs[block] = model(ids).logits[0].log_softmax(dim=-1)
            print(f"{text.source}: blocks of {block or 'no'} tokens", file=sys.stderr)
        for block in blocks:
            found[block].append(float((logs[0].exp() * (logs[0] - logs[block])).sum(dim=-1).mean()))
    return found


def gain(ratio: float, length: int) -> float:
    """How many times as many requests of about `length` tokens are held if full blocks have 8 bits."""
    share = FORMATS["int8"].row_bytes(DIM, 2) / (4 * DIM)
    lengths = np.arange(length - SEGMENT // 2, length + SEGMENT // 2)
    sealed, rest = lengths // SEGMENT * SEGMENT * ratio, lengths % SEGMENT
    wide = -(-rest // BLOCK) * BLOCK
    coded = rest // BLOCK * BLOCK * share + (rest % BLOCK > 0) * BLOCK
    return float((sealed + wide).sum() / (sealed + coded).sum())


def tables(document: dict[str, Any]) -> list[Rows]:
    """Of what `main` writes."""
    losses = tuple((str(block), f"{np.mean(one):.5f}", f"{max(one):.5f}") for block, one in document["kl"].items())
    times = tuple((str(ratio), *(f"{one:.2f}x" for one in own.values())) for ratio, own in document["gains"].items())
    return [
        Rows(f"KL of full blocks in 8 bits, {document['model']}", ("tokens of a block", "mean", "worst text"), losses),
        Rows("requests held, beside 16 bits, by their tokens", ("ratio", *map(str, LENGTHS)), times),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--length", type=int, default=1280, help="tokens of a text [%(default)s]")
    parser.add_argument("--block", type=int, nargs="+", default=[32, 64], help="tokens of a block [32 64]")
    parser.add_argument("--output", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    if not given.model.is_dir():
        raise SystemExit(
            f"{given.model} is no folder; python -m benchmarks.real_model --output {given.model} makes one"
        )
    try:
        found = divergences(given.model, given.block, given.length)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    gains = {ratio: {length: gain(ratio, length) for length in LENGTHS} for ratio in RATIOS}
    document = {"model": given.model.name, "kl": found, "texts": list(SOURCES), "gains": gains}
    console = Console()
    for rows in tables(document):
        rows.show(console)
    if given.output is not None:
        given.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

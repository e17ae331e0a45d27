"""Calibration samples of the evaluation's own kind: what the built-in ones lose by not knowing what is asked later.

    python -m benchmarks.quality.own_samples --model models/smollm2-135m --output own.jsonl
    python -m calib run --model models/smollm2-135m --data own.jsonl --output own.safetensors
    python -m benchmarks.quality --model models/smollm2-135m --scorer gate --budgets own.safetensors

Half of them are other pieces of the same sources, half are interviews with other draws of the same facts, questions and
answers. A profile made of them is a yardstick, not something to serve with.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.harness.command import command
from benchmarks.harness.files import write_whole
from benchmarks.quality.facts import KINDS, interviews
from benchmarks.quality.texts import SOURCES, first_token, read
from sgl_ragged.profiles.built_in_samples import SAMPLES

SEED = 1
"""The evaluation draws its interviews with seed 0."""


def other_pieces(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, sources in turns, none overlapping the piece in the middle of its source.

    That piece is the evaluated one (`texts.pieces` with one piece per source). Of a source without that much room
    beside it there are shorter pieces.
    """
    rng = np.random.default_rng(SEED)
    found = []
    for source in itertools.islice(itertools.cycle(SOURCES), count):
        ids = tokenizer.encode(read(source), add_special_tokens=False)
        middle = (len(ids) - length) // 2
        side = ids[:middle] if rng.integers(2) else ids[middle + length :]
        start = int(rng.integers(max(len(side) - length, 0) + 1))
        found.append([*first_token(tokenizer), *side[start : start + length]])
    return found


def asked_interviews(tokenizer: Any, count: int, facts: int, length: int) -> list[list[int]]:
    """`count` contexts with facts, kinds in turns, each with all of its questions and their answers behind it."""
    drawn = [interviews(tokenizer, kind, count, facts=facts, length=length, seed=SEED) for kind in KINDS]
    found = []
    for interview in [one for pair in zip(*drawn, strict=True) for one in pair][:count]:
        ids = list(interview.context)
        for question in interview.questions:
            ids += [*question.suffix, *tokenizer.encode(f" {question.answer}.\n", add_special_tokens=False)]
        found.append(ids)
    return found


def own_samples(tokenizer: Any, count: int, length: int, facts: int, context: int) -> list[dict[str, Any]]:
    """`count` samples for `calib run --data`."""
    texts = [{"task": "text", "input_ids": ids} for ids in other_pieces(tokenizer, length, count - count // 2)]
    return texts + [
        {"task": "facts", "input_ids": ids} for ids in asked_interviews(tokenizer, count // 2, facts, context)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"[{SAMPLES}]")
    parser.add_argument("--length", type=int, default=1280, help="tokens of a text [1280]")
    parser.add_argument("--facts", type=int, default=8, help="in a context [8]")
    parser.add_argument("--context", type=int, default=800, help="tokens of real text in a context with facts [800]")
    parser.add_argument("--output", type=Path, required=True, help=".jsonl")
    options = parser.parse_args()
    if options.samples < 2:
        parser.error("--samples must be at least 2: texts and interviews")
    with command("own_samples"):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        made = own_samples(tokenizer, options.samples, options.length, options.facts, options.context)
        write_whole(options.output, "".join(json.dumps(one) + "\n" for one in made))


if __name__ == "__main__":
    main()

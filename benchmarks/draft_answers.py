"""Whether answers with drafts are those without: greedy answers of two servers, from nothing and from the cache.

    python -m benchmarks draft_answers --model FOLDER --kind ngram [--answers 200] [--texts FILE ...]
    python -m benchmarks draft_answers --model FOLDER --head FOLDER [--kind eagle3]

The head is one of `python -m benchmarks draft_head`. Both servers have the ragged pool; prompts of random tokens, or
cut from files of text or of samples (`python -m benchmarks recall.samples`), are of many lengths, so that answers go
over borders of segments and end inside them. Every prompt is asked twice. Compared are tokens, up to where the best two
are closer than 1e-3, log-probabilities of these, how much of the second came from the cache, and how many pages the
cache has in the end, once with what is behind borders and once without.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.draft_head import KINDS, make_prompts
from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.launch import Server, serve
from benchmarks.harness.options import new_parser

NGRAM = "ngram"

CLOSE = 1e-3
"""Log-probabilities so close may change places."""

AT_ONCE = 4

GAUGES = ("slab_bytes", "kept_open_bytes")
"""Of all pages that are not free, and of those with open segments that requests have left."""

IDLE_S = 40
"""An idle server writes its gauges every half minute."""


@dataclass(frozen=True)
class Answer:
    """gaps: between the best two log-probabilities of each token. per_step: tokens that a step has given."""

    tokens: list[int]
    logprobs: np.ndarray
    gaps: np.ndarray
    cached: int
    per_step: float


def ask(url: str, prompt: list[int], new: int) -> Answer:
    """Greedy, exactly `new` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    response = httpx.post(f"{url}/generate", json=body, timeout=1800)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    return Answer(
        tokens=[entry[1] for entry in meta["output_token_logprobs"]],
        logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]]),
        gaps=np.array([first[0] - second[0] for first, second in meta["output_top_logprobs"]]),
        cached=meta["cached_tokens"],
        per_step=meta.get("spec_accept_length", 1.0),
    )


def ask_twice(url: str, prompts: list[list[int]], new: int) -> list[list[Answer]]:
    """All prompts from nothing, and all again."""
    with ServerClient(url) as client:
        client.flush()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [list(threads.map(lambda one: ask(url, one, new), prompts)) for _ in range(2)]


def cached_pages(server: Server) -> dict[str, int]:
    """Pages of slabs and of open segments that a server has as cache which has had no requests for `IDLE_S`."""
    time.sleep(IDLE_S)
    with ServerClient(server.url) as client:
        page_bytes = client.ragged()["slab_bytes"]
        found = {one.name: one.samples for one in text_string_to_metric_families(client.metrics())}
    slabs, kept = (int(found[f"sglang:ragged_{name}_in_use"][0].value) for name in GAUGES)
    return {"slabs": (slabs - kept) // page_bytes, "open": kept // page_bytes}


def compare(found: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """Counts of answers that are equal, equal up to two tokens as good as equal, and different; and of the cache.

    `logprobs`: the largest difference of log-probabilities of equal tokens.
    """
    counts = {"equal": 0, "close": 0, "different": 0}
    largest = 0.0
    for have, want in zip(found, wanted, strict=True):
        same = next((i for i, pair in enumerate(zip(have.tokens, want.tokens, strict=True)) if len(set(pair)) > 1), -1)
        counts["equal" if same < 0 else "close" if want.gaps[same] < CLOSE else "different"] += 1
        until = len(want.tokens) if same < 0 else same
        largest = max(largest, float(np.abs(have.logprobs[:until] - want.logprobs[:until]).max(initial=0)))
    as_much = sum(have.cached == want.cached for have, want in zip(found, wanted, strict=True))
    more = {"logprobs": largest, "as_much_cached": as_much, "cached": sum(one.cached for one in found)}
    return counts | more | {"per_step": float(np.mean([one.per_step for one in found]))}


def read_prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Prompts of 8 to --longest tokens. Raises SettingsError for samples that are too short."""
    rng, count, longest = np.random.default_rng(options.seed), options.answers, options.longest
    lengths = rng.integers(8, longest + 1, count).tolist()
    if options.samples:
        samples = [json.loads(line)["input_ids"] for line in options.samples.read_text().splitlines()]
        if min(map(len, samples), default=0) < longest:
            raise SettingsError(f"--samples has none, or one of fewer than --longest {longest} tokens")
        # The same sample again begins elsewhere, so that prompts do not share more than they would by chance.
        starts = [int(rng.integers(len(samples[i % len(samples)]) - longest + 1)) for i in range(count)]
        return [samples[i % len(samples)][s : s + n] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    cut = make_prompts(options.model, vocabulary, count, longest, options.texts, options.seed + 1).tolist()
    return [one[:length] for one, length in zip(cut, lengths, strict=True)]


def main() -> None:
    parser = new_parser("draft_answers", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder")
    parser.add_argument("--head", type=Path, help="folder; needed but for n-grams")
    parser.add_argument("--kind", choices=(*KINDS, NGRAM), default="eagle", help="[eagle]")
    parser.add_argument("--answers", type=int, default=200, help="[200]")
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt [300]")
    parser.add_argument("--new", type=int, default=40, help="tokens of an answer [40]")
    parser.add_argument("--texts", type=Path, nargs="*", default=(), help="files that prompts are cut from")
    parser.add_argument("--samples", type=Path, help="a file of samples that prompts are cut from")
    parser.add_argument("--ratio", default="0.5", help="[0.5]")
    parser.add_argument("--segment", type=int, default=64, help="[64]")
    parser.add_argument("--slab-dtype", default="wide", help="[wide]")
    parser.add_argument("--steps", type=int, default=4, help="drafts of a chain [4]")
    parser.add_argument("--kv-bytes", default="2GiB", help="of every server [2GiB]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    options = parser.parse_args()
    with command("draft_answers"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Ask both servers, one after the other, and print one JSON object. Raises BenchmarkError."""
    if min(options.answers, options.new, options.steps, options.longest - 7) < 1:
        raise SettingsError("sizes must be at least 1, and --longest at least 8")
    if (options.head is None) != (options.kind == NGRAM):
        raise SettingsError(f"--kind {options.kind} {'has no head: drop' if options.head else 'needs'} --head")
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(options, vocabulary)
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", str(AT_ONCE), "--sleep-on-idle"]
    flags += ["--kv-pool", "ragged", "--ragged-profile", "uniform", "--ragged-ratio", options.ratio]
    flags += ["--ragged-segment", str(options.segment), "--ragged-slab-dtype", options.slab_dtype]
    flags += ["--kv-bytes", options.kv_bytes, "--chunked-prefill-size", str(4 * options.segment)]
    flags += ["--enable-metrics"]
    drafts = ["--speculative-algorithm", options.kind.upper()]
    if options.kind == NGRAM:
        drafts += ["--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", str(options.steps + 1)]
    else:
        drafts += ["--speculative-draft-model-path", str(options.head), "--speculative-eagle-topk", "1"]
        drafts += ["--speculative-num-steps", str(options.steps)]
    answers, pages = [], []
    with tempfile.TemporaryDirectory() as folder:
        for more in ([], drafts):
            with serve(options.model, *flags, *more, log=Path(folder) / "server.log") as server:
                answers.append(ask_twice(server.url, prompts, options.new))
                pages.append(cached_pages(server))
    plain, drafted = answers
    found = {
        "nothing cached": compare(drafted[0], plain[0]),
        "from the cache": compare(drafted[1], plain[1]),
        "a hit against a miss": compare(drafted[1], drafted[0]),
        "the same without drafts": compare(plain[1], plain[0]),
        "pages cached": {"without drafts": pages[0], "with": pages[1]},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What a bound on histories costs, for each score by which segments leave.

The first server is SGLang's token pool, the second has no bound. All are asked for facts hidden in long texts, too.
docs/bounded-history.md says more.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.harness.command import provenance
from benchmarks.harness.options import check_counts
from benchmarks.harness.pools import Pool
from benchmarks.quality import tasks
from benchmarks.quality.history.results import Measured, Results, draw, tables, text_nll
from benchmarks.quality.sweep import answers, finish

SCORES = ("value_novelty", "value_key_norm", "recency")
SHARES = (0.5, 0.25)
"""Bounds by default, as shares of a text."""

DEFAULTS = {"segment": 128, "length": 3072, "interviews": 3, "kv_bytes": "512MiB", "output": Path("history.json")}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=1.0, help="of all pools; 1 shows what the bound alone costs [1]")
    parser.add_argument("--bounds", type=int, nargs="+", help="tokens [half and a quarter of --length]")
    parser.add_argument("--scores", nargs="+", default=list(SCORES), help=f"[{' '.join(SCORES)}]")
    tasks.add_options(parser)
    parser.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged servers")


def pools_of(options: argparse.Namespace) -> list[Pool]:
    """The token pool, the ragged pool without a bound, and with each bound and score."""
    size = options.segment
    bounds = options.bounds or [int(options.length * share) // size * size for share in SHARES]
    bounded = [
        Pool(options.ratio, (("history", str(bound)), ("history-score", score)))
        for bound in bounds
        for score in options.scores
    ]
    return [Pool(None), Pool(options.ratio), *bounded]


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, draw and print. Raises BenchmarkError."""
    check_counts(options, "interviews")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Room for the facts themselves, the question and the template.
    asked = tasks.Tasks.of(options, tokenizer, options.length - 250)
    settings = {
        "model": Path(options.model).resolve().name,
        **{name: getattr(options, name) for name in ("ratio", "segment", "pieces", "interviews", "facts")},
        "text_tokens": options.length,
    }
    results = Results.open(options.output, settings, provenance("benchmarks.quality"))
    served = {pool.name: (pool, ()) for pool in pools_of(options) if pool.name not in results.known}
    flags = ["--ragged-segment", str(options.segment), *shlex.split(options.ragged_args)]
    for name, found in answers(options, asked, tokenizer, text_nll, served, requests=2, ragged=flags):
        results.pools[name] = Measured(found.texts, found.right, found.start_up)
        results.write()
    finish(options, results, draw, tables)

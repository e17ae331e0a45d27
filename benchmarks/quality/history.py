"""What a bound on histories costs, for each score by which segments leave.

The first server is SGLang's token pool, the second has no bound. All are asked for facts hidden in long texts, too.
docs/bounded-history.md says more.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.harness.options import check_counts
from benchmarks.harness.pools import Pool
from benchmarks.harness.results import Results
from benchmarks.harness.table import Table
from benchmarks.quality import tasks
from benchmarks.quality.sweep import answers, finish
from benchmarks.quality.table import mean_and_error
from benchmarks.quality.texts import Text

SCORES = ("value_novelty", "value_key_norm", "recency")
SHARES = (0.5, 0.25)
"""Bounds by default, as shares of a text."""

PARTS = 8
"""Equal parts of a text that have figures of their own."""

DEFAULTS = {"segment": 128, "length": 3072, "interviews": 3, "kv_bytes": "512MiB", "output": Path("history.json")}


@dataclass(frozen=True)
class Measured:
    """Figures of one pool.

    Attributes:
        nll: for each text, the mean of each part's tokens, nats.
        right: for each interview, its questions in the order in which their facts stand in the context.
    """

    nll: list[list[float]]
    right: list[list[bool]]
    start_up: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=1.0, help="of all pools; 1 shows what the bound alone costs [1]")
    parser.add_argument("--bounds", type=int, nargs="+", help="tokens [half and a quarter of --length]")
    parser.add_argument("--scores", nargs="+", default=list(SCORES), help=f"[{' '.join(SCORES)}]")
    tasks.add_options(parser)
    parser.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged servers")


def pools_of(options: argparse.Namespace) -> list[Pool]:
    """List the token pool, the ragged pool without a bound, and with each bound and score."""
    size = options.segment
    bounds = options.bounds or [int(options.length * share) // size * size for share in SHARES]
    bounded = [
        Pool(options.ratio, (("history", str(bound)), ("history-score", score)))
        for bound in bounds
        for score in options.scores
    ]
    return [Pool(None), Pool(options.ratio), *bounded]


def text_nll(client: ServerClient, text: Text) -> list[float]:
    """Mean negative log-probability of the tokens in each part of a text. Raises ServerLost and PointFailed."""
    answer = client.generate(text.ids, 1, return_logprobs=True)
    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
    if len(found) != len(text.ids) - 1:
        raise PointFailed(f"the server returned log-probabilities of {len(found)} of {len(text.ids) - 1} tokens")
    return [round(-float(np.mean(part)), 6) for part in np.array_split(found, PARTS)]


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError."""
    from transformers import AutoTokenizer

    check_counts(options, "interviews")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Room for the facts themselves, the question and the template.
    asked = tasks.Tasks.of(options, tokenizer, options.length - 250)
    settings = {
        "model": Path(options.model).resolve().name,
        **{name: getattr(options, name) for name in ("ratio", "segment", "pieces", "interviews", "facts")},
        "text_tokens": options.length,
    }
    results = Results.open(options.output, "quality.history", settings)
    served = {pool.name: (pool, ()) for pool in pools_of(options) if pool.name not in results.entries}
    flags = ["--ragged-segment", str(options.segment), *shlex.split(options.ragged_args)]
    for name, found in answers(options, asked, tokenizer, text_nll, served, requests=2, ragged=flags):
        results.add(name, Measured(found.texts, found.right, found.start_up))
    finish(options, results, tables(results))


def bound_of(pool: str) -> int:
    """Read --ragged-history from a pool's name, such as ragged@1+history=1536; 0 without."""
    options = dict(option.partition("=")[::2] for option in pool.split("+")[1:])
    return int(options.get("history", 0))


def after_bound(length: int, bound: int) -> slice:
    """The parts of a text that are after its first `bound` tokens as a whole."""
    return slice(-(-bound * PARTS // length), None)


def tables(results: Results) -> list[Table]:
    """One row for each pool; `after the bound`: after the longest one of the file."""
    pools = results.as_kind(Measured)
    own = after_bound(results.settings["text_tokens"], max(map(bound_of, pools)))
    facts = max((len(right) for found in pools.values() for right in found.right), default=0)
    columns = ["pool", *(f"{n + 1}/{PARTS}" for n in range(PARTS)), "after the bound", "facts"]
    columns += [f"fact {n + 1}" for n in range(facts)]
    rows = []
    for name, found in pools.items():
        lost = np.array(found.nll) - np.array(pools["token"].nll)
        right = np.array(found.right)
        cells = [name, *(f"{value:.3f}" for value in lost.mean(axis=0))]
        cells.append("{:.4f} ± {:.4f}".format(*mean_and_error(lost[:, own].mean(axis=1))))
        cells.append(f"{int(right.sum())} of {right.size}")
        rows.append([*cells, *(f"{share:.2f}" for share in right.mean(axis=0))])
    title = "delta NLL to the token pool by eighth of the texts; facts known, all and by their place in the context"
    return [Table(title, columns, rows)]

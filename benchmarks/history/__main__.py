"""What a bound on histories costs a real model, for each score by which segments leave.

    python -m benchmarks.history --model models/smollm2-135m --ragged-args "--ragged-profile gate.safetensors"

Each pool is a server of its own; all read the same long texts and answer the same questions about facts hidden in
them. The first is SGLang's token pool. Writes JSON and a plot, prints a table. docs/bounded-history.md says more.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError
from benchmarks.harness.pool_results import TOKEN
from benchmarks.harness.pools import Pool, Started
from benchmarks.history.measured import measure
from benchmarks.history.results import Results, draw, table
from benchmarks.quality.facts import KINDS, interviews
from benchmarks.quality.texts import pieces

SCORES = ("value_novelty", "value_key_norm", "recency")
SHARES = (0.5, 0.25)
"""Bounds by default, as shares of a text."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--ratio", type=float, default=1.0, help="of all pools; 1 shows what the bound alone costs [1]")
    made.add_argument("--segment", type=int, default=128, help="tokens [128]")
    made.add_argument("--bounds", type=int, nargs="+", help="tokens [half and a quarter of --length]")
    made.add_argument("--scores", nargs="+", default=list(SCORES), help=f"[{' '.join(SCORES)}]")
    made.add_argument("--length", type=int, default=3072, help="tokens of a text [3072]")
    made.add_argument("--pieces", type=int, default=1, help="of every source [1]")
    made.add_argument("--interviews", type=int, default=3, help="contexts with facts, of each kind [3]")
    made.add_argument("--facts", type=int, default=8, help="in a context [8]")
    made.add_argument("--kv-bytes", default="512MiB")
    made.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged servers")
    made.add_argument("--output", type=Path, default=Path("history.json"))
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


def pools_of(options: argparse.Namespace, bounds: list[int]) -> list[Pool]:
    """The token pool, the ragged pool without a bound, and with each bound and score."""
    bounded = [
        Pool(options.ratio, (("history", str(bound)), ("history-score", score)))
        for bound in bounds
        for score in options.scores
    ]
    return [Pool(None), Pool(options.ratio), *bounded]


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, draw and print. Raises BenchmarkError."""
    numbers = ("segment", "length", "pieces", "interviews", "facts")
    if min(getattr(options, name) for name in numbers) < 1:
        raise SettingsError(", ".join(f"--{name}" for name in numbers) + " must be at least 1")
    size = options.segment
    bounds = options.bounds or [int(options.length * share) // size * size for share in SHARES]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = pieces(tokenizer, options.length, options.pieces)
    asked = [
        one
        for kind in KINDS
        # Room for the facts themselves, the question and the template.
        for one in interviews(tokenizer, kind, options.interviews, facts=options.facts, length=options.length - 250)
    ]
    settings = {
        "model": Path(options.model).resolve().name,
        **{name: getattr(options, name) for name in ("ratio", "segment", "pieces", "interviews", "facts")},
        "text_tokens": options.length,
    }
    results = Results.open(options.output, settings, provenance("benchmarks.history"))
    wanted = [pool for pool in pools_of(options, bounds) if pool.name not in results.known]
    console = Console(stderr=options.json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    flags = ["--ragged-segment", str(options.segment), *shlex.split(options.ragged_args)]
    if wanted:
        count = len(texts) + sum(len(one.questions) for one in asked)
        with (
            Started(options.model, options.kv_bytes, [], flags) as servers,
            Progress(*columns, console=console) as progress,
        ):
            for pool in wanted:
                task = progress.add_task(pool.name, total=count)
                log = options.output.with_suffix(".log")
                try:
                    with servers.client(pool, 2, log) as client:
                        results.pools[pool.name] = measure(
                            client, texts, asked, tokenizer, lambda task=task: progress.advance(task)
                        )
                except ServerLost as error:
                    raise ServerLost(f"the server of {pool.name} is gone ({error}); its log is {log}") from None
                except (PointFailed, ServerFailed) as error:
                    reason = error.reason if isinstance(error, ServerFailed) else error
                    raise SettingsError(f"{pool.name}: {reason}; the log of its server is {log}") from None
                results.write()
                log.unlink(missing_ok=True)
    assert TOKEN in results.known
    draw(results, options.output.with_suffix(".png"))
    if options.json:
        print(results.text(), end="")
    else:
        table(results, max(bounds)).show(console)
    console.print(f"results and plot: {options.output.with_suffix('')}.*", highlight=False, soft_wrap=True)


def main() -> None:
    options = parser().parse_args()
    with command("history"):
        run(options)


if __name__ == "__main__":
    main()

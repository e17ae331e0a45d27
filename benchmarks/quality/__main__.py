"""What compression costs a real model: changed distributions, changed continuations, lost facts.

    python -m benchmarks.real_model --output models/smollm2-135m
    python -m benchmarks.quality --model models/smollm2-135m [--scorer gate keydiff] [--ratio 0.5 0.3 0.2]

Each configuration is a server of its own; all read the same texts and answer the same questions as SGLang's token pool.
With `--peers` (an environment made by `make peers`), methods of kvpress keep the same share of the same contexts.
Writes JSON and a plot, prints a table. benchmarks/quality/README.md says what is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError
from benchmarks.harness.pools import Pool, Started
from benchmarks.quality.configuration import UNFITTED, WIDE, Configuration, configurations
from benchmarks.quality.facts import KINDS, interviews
from benchmarks.quality.head import load_head
from benchmarks.quality.measured import Measured, Tasks, measure
from benchmarks.quality.peering import ask_peers
from benchmarks.quality.plot import draw
from benchmarks.quality.store import Results
from benchmarks.quality.table import show
from benchmarks.quality.texts import SOURCES, pieces
from sgl_ragged.mem_pool import slab_format
from sgl_ragged.plugin.options import FITTED

CALIBRATION_S = 3600.0
"""A server that calibrates its model first takes minutes to start."""

CHUNK = 4096
"""Tokens that servers prefill at once by default, here. Of what they prefill before, they return no hidden states."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--scorer", nargs="+", default=["default"], help="[default: the server's own choice]")
    made.add_argument("--budgets", nargs="+", default=["auto"], help="auto, uniform or profiles by {scorer} [auto]")
    made.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.3, 0.2])
    made.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        default=[WIDE],
        choices=(WIDE, "fp8_e4m3", "fp8_e5m2"),
        help="of the ragged pool; ratio 0.6 in FP8 has the bytes of 0.3 in 16 bits [auto]",
    )
    made.add_argument(
        "--slab-dtype",
        nargs="+",
        default=[slab_format.WIDE.name],
        choices=tuple(slab_format.FORMATS),
        help="how finished segments are stored; ratios are of a 16-bit cache's bytes [wide]",
    )
    made.add_argument(
        "--fit",
        nargs="+",
        default=[FITTED],
        choices=(FITTED, UNFITTED),
        help="whether what heads keep is fitted, where profiles have a codebook [auto]",
    )
    made.add_argument("--segment", type=int, default=256)
    made.add_argument("--length", type=int, default=1280, help="tokens of a text [1280]")
    made.add_argument("--texts", nargs="+", choices=tuple(SOURCES), default=list(SOURCES), help="sources [all]")
    made.add_argument("--pieces", type=int, default=1, help="pieces of every source [1]")
    made.add_argument("--interviews", type=int, default=6, help="contexts with facts, of each kind [6]")
    made.add_argument("--facts", type=int, default=8, help="in a context [8]")
    made.add_argument("--context", type=int, default=800, help="tokens of real text in a context with facts [800]")
    made.add_argument("--kv-bytes", default="512MiB")
    made.add_argument("--peers", type=Path, metavar="PYTHON", help="interpreter with kvpress, .venv-peers/bin/python")
    made.add_argument("--output", type=Path, default=Path("quality.json"))
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, draw and print. Raises BenchmarkError."""
    model = Path(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tasks = Tasks(
        texts=pieces(tokenizer, options.length, options.pieces, options.texts),
        interviews=[
            interview
            for kind in KINDS
            for interview in interviews(
                tokenizer, kind, options.interviews, facts=options.facts, length=options.context
            )
        ],
        segment=options.segment,
    )
    settings = {"model": model.resolve().name, **tasks.describe()}
    results = Results.open(options.output, settings, provenance("benchmarks.quality"))
    wanted = configurations(
        options.scorer, options.budgets, options.ratio, options.kv_cache_dtype, options.slab_dtype, options.fit
    )
    console = Console(stderr=options.json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    missing = [one for one in wanted if one not in results.known]
    if missing:
        head = load_head(model)
        with (
            Started(options.model, options.kv_bytes, _common(options.length, options.segment), []) as servers,
            Progress(*columns, console=console) as progress,
        ):
            bar = progress.add_task("servers", total=len(missing) + 1)
            reference = results.load_reference() if Configuration.token() in results.known else None
            if reference is None:
                token = _measured(Configuration.token(), servers, options, tasks, tokenizer, progress)
                reference = token.states
                results.keep_reference(reference)
                results.add(Configuration.token(), token.result(reference, head, tasks))
            progress.advance(bar)
            for one in missing:
                found = _measured(one, servers, options, tasks, tokenizer, progress)
                results.add(one, found.result(reference, head, tasks))
                progress.advance(bar)
    if options.peers is not None:
        with Progress(*columns, console=console) as progress:
            ask_peers(options.peers, options.model, tasks, tokenizer, options.ratio, results, progress)
    draw(results, options.output.with_suffix(".png"))
    if options.json:
        print(results.text(), end="")
    else:
        show(results, console)
    console.print(f"results and plot: {options.output.with_suffix('')}.*", highlight=False, soft_wrap=True)


def _common(length: int, segment: int) -> list[str]:
    """Flags of all servers. Texts are prefilled at once."""
    whole = ["--chunked-prefill-size", str(-(-length // segment) * segment)] if length > CHUNK else []
    return ["--enable-return-hidden-states", *whole]


def _measured(
    one: Configuration,
    servers: Started,
    options: argparse.Namespace,
    tasks: Tasks,
    tokenizer: object,
    progress: Progress,
) -> Measured:
    own = progress.add_task(str(one), total=tasks.count)
    log = options.output.with_suffix(".log")
    try:
        flags = one.flags(options.segment)
        with servers.client(Pool(one.served_ratio), 4, log, flags, ready_within_s=CALIBRATION_S) as client:
            found = measure(client, tasks, tokenizer, lambda: progress.advance(own))
    except ServerLost as error:
        raise ServerLost(f"the server of {one} is gone ({error}); its log is {log}") from None
    except PointFailed as error:
        raise SettingsError(f"{one}: {error}; the log of its server is {log}") from None
    except ServerFailed as error:
        raise SettingsError(f"the server of {one} did not start, its log is {log}: {error.reason}") from None
    progress.remove_task(own)
    log.unlink(missing_ok=True)
    return found


def main() -> None:
    options = parser().parse_args()
    with command("quality"):
        run(options)


if __name__ == "__main__":
    main()

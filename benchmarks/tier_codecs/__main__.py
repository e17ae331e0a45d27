"""What codecs of the host tier cost: contexts leave the device, come back through each codec, and are continued.

    python -m benchmarks real_model --output models/smollm2-135m
    python -m benchmarks tier_codecs --model models/smollm2-135m [--ratio 0.5 0.3] [--budgets auto uniform]
    python -m benchmarks tier_codecs --model benchmarks/recall/checkpoint --suite recall --scorer keydiff \\
        --budgets benchmarks/recall/keydiff-coverage.safetensors

Every codec is a server of its own whose pool holds two contexts. The reference is the server with codec exact, with
contexts that are still on the device. benchmarks/tier_codecs/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.command import command
from benchmarks.harness.options import new_parser
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.harness.table import Table
from benchmarks.quality.head import compare, load_head
from benchmarks.quality.sweep import CALIBRATION_S
from benchmarks.quality.table import mean_and_error
from benchmarks.tier_codecs.asking import Answers, continue_restored, read_contexts
from benchmarks.tier_codecs.suites import SUITES, Talk, from_recall, from_texts, is_right, kinds, pool_tokens
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES

HOST_TOKENS = 40
"""Tokens of the host per token of the device's pool: nothing is to leave the host."""


@dataclass(frozen=True)
class Measured:
    """One codec at one ratio, with one kind of budgets.

    Attributes:
        row_bytes: of a segment in the tier. exact_bytes: of its slab. restored: tokens that came back.
        kl, delta_nll, agrees: of every continuation, means over its tokens but the last (`quality.head.Difference`),
            against the same server with the context on the device.
        right, reference_right: of every kind, right answers from restored contexts and from those on the device, and
            how many questions there were.
    """

    row_bytes: int
    exact_bytes: int
    restored: int
    kl: list[float]
    delta_nll: list[float]
    agrees: list[float]
    right: dict[str, tuple[int, int]]
    reference_right: dict[str, tuple[int, int]]
    start_up: str


def parser() -> argparse.ArgumentParser:
    made = new_parser("tier_codecs", __doc__)
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--suite", choices=SUITES, default=SUITES[0], help="recall: for the recall model [texts]")
    made.add_argument(
        "--codec", nargs="+", choices=CODEC_NAMES[1:], default=CODEC_NAMES[1:], help="in addition to exact"
    )
    made.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.3])
    made.add_argument("--budgets", nargs="+", default=["auto"], help="auto, uniform or profiles [auto]")
    made.add_argument("--scorer", help="[the server's own choice]")
    made.add_argument("--segment", type=int, default=256)
    made.add_argument("--interviews", type=int, default=6, help="contexts with questions, of each kind [6]")
    made.add_argument("--kv-bytes", default="512MiB")
    made.add_argument("--output", type=Path, metavar="FILE.json", default=Path("tier-codecs.json"))
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    return made


def count_right(suite: str, tokenizer: Any, talks: Sequence[Talk], answers: Answers) -> dict[str, tuple[int, int]]:
    """Count right answers and questions, by kind."""
    found = {}
    for kind in kinds(talks):
        marks = [
            is_right(suite, question.answer, tokenizer.decode(said))
            for talk, every in zip(talks, answers.said, strict=True)
            if talk.kind == kind
            for question, said in zip(talk.questions, every, strict=True)
        ]
        found[kind] = (sum(marks), len(marks))
    return found


def differences(
    head: torch.Tensor, talks: Sequence[Talk], reference: Answers, found: Answers
) -> dict[str, list[float]]:
    """kl, delta_nll and agrees of every continuation."""
    read = [talk for talk in talks if talk.continuation]
    rows = [
        compare(head, want, have, torch.tensor(talk.continuation)).means()
        for talk, want, have in zip(read, reference.states, found.states, strict=True)
    ]
    return {name: [round(one[name], 7) for one in rows] for name in ("kl", "delta_nll", "agrees")}


def table(results: Results) -> Table:
    rows: list[tuple[str, ...]] = []
    pools = results.as_kind(Measured)
    names = list(next(iter(pools.values())).right) if pools else []
    for name, one in pools.items():
        known = [f"{one.right[kind][0]} of {one.right[kind][1]} ({one.reference_right[kind][0]})" for kind in names]
        means = ["{:.2g} ± {:.1g}".format(*mean_and_error(values)) for values in (one.kl, one.delta_nll)]
        per_token = f"{one.row_bytes / results.settings['segment']:,.0f}"
        shares = [per_token, f"{one.row_bytes / one.exact_bytes:.3f}"]
        rows.append((name, *shares, *means, f"{np.mean(one.agrees):.3f}", *known))
    columns = ("budgets, ratio, codec", "bytes per token", "of exact", "KL", "delta NLL", "top-1 same")
    title = "Restored from the host against the same on the device; in brackets, facts known without restoring"
    return Table(title, (*columns, *(f"facts, {kind}" for kind in names)), rows)


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError."""
    from transformers import AutoTokenizer

    model, tokenizer = Path(options.model), AutoTokenizer.from_pretrained(options.model)
    if options.suite == "recall":
        talks = from_recall(options.interviews, segment=options.segment)
    else:
        talks = from_texts(tokenizer, options.interviews, segment=options.segment)
    settings = {
        "model": model.resolve().name,
        **{name: getattr(options, name) for name in ("suite", "scorer", "segment", "interviews")},
    }
    results = Results.open(options.output, "tier_codecs", settings)
    head, console = load_head(model), Console(stderr=options.json)
    common = ["--enable-return-hidden-states", "--max-total-tokens", str(pool_tokens(talks, options.segment))]
    ragged = ["--ragged-segment", str(options.segment), "--enable-hierarchical-cache"]
    ragged += ["--hicache-ratio", str(HOST_TOKENS), *(["--ragged-scorer", options.scorer] if options.scorer else [])]
    codecs = (CODEC_NAMES[0], *options.codec)
    wanted = list(itertools.product(options.budgets, options.ratio))
    with (
        Started(options.model, options.kv_bytes, common, ragged) as servers,
        bars(Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("servers", total=len(wanted) * len(codecs))
        for budgets, ratio in wanted:
            names = {codec: f"{Path(budgets).name}, {ratio:g}, {codec}" for codec in codecs}
            if set(names.values()) <= set(results.entries):
                progress.advance(bar, len(codecs))
                continue
            reference: Answers | None = None
            for codec, name in names.items():
                flags = ["--ragged-profile", budgets, "--ragged-host-codec", codec]
                on_device, restored, info = _asked(servers, name, Pool(ratio), flags, talks, options, progress)
                reference = reference or on_device
                measured = Measured(
                    row_bytes=info["tier"]["row_bytes"],
                    exact_bytes=info["slab_bytes"],
                    restored=restored.restored,
                    **differences(head, talks, reference, restored),
                    right=count_right(options.suite, tokenizer, talks, restored),
                    reference_right=count_right(options.suite, tokenizer, talks, reference),
                    start_up=info["summary"],
                )
                results.add(name, measured)
                progress.advance(bar)
    results.show([table(results)], console, as_json=options.json)
    console.print(f"results: {options.output}", highlight=False, soft_wrap=True)


def _asked(
    servers: Started,
    name: str,
    pool: Pool,
    flags: list[str],
    talks: list[Talk],
    options: argparse.Namespace,
    progress: Progress,
) -> tuple[Answers, Answers, dict[str, Any]]:
    """Return answers from the device (of exact alone) and restored, and the server's settings."""
    own = progress.add_task(name, total=2 * len(talks))
    log = options.output.with_suffix(".log")

    def advance() -> None:
        progress.advance(own)

    with naming(name, log), servers.client(pool, 2, log, flags, ready_within_s=CALIBRATION_S) as client:
        exact = flags[-1] == CODEC_NAMES[0]
        on_device = read_contexts(client, talks, options.segment, ask=exact, advance=advance)
        restored = continue_restored(client, talks, options.segment, advance)
        info = client.ragged()
    progress.remove_task(own)
    log.unlink(missing_ok=True)
    return on_device, restored, info


def main() -> None:
    options = parser().parse_args()
    with command("tier_codecs"), torch.inference_mode():
        run(options)


if __name__ == "__main__":
    main()

"""What codecs of the host tier cost: contexts leave the device, come back through each codec, and are gone on with.

    python -m benchmarks.real_model --output models/smollm2-135m
    python -m benchmarks.tier_codecs --model models/smollm2-135m [--ratio 0.5 0.3] [--budgets auto uniform]
    python -m benchmarks.tier_codecs --model benchmarks/recall/checkpoint --suite recall --scorer keydiff \\
        --budgets benchmarks/recall/keydiff-coverage.safetensors

Every codec is a server of its own whose pool holds two contexts. The reference is the server with codec exact, with
contexts that are still on the device. benchmarks/tier_codecs/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import write_whole
from benchmarks.harness.machine import describe
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.sweep import bars, naming
from benchmarks.quality.head import load_head
from benchmarks.quality.sweep import CALIBRATION_S
from benchmarks.tier_codecs.asking import Answers, go_on_restored, read_contexts
from benchmarks.tier_codecs.results import Result, count_right, differences, document, draw, table
from benchmarks.tier_codecs.suites import SUITES, Talk, from_recall, from_texts, pool_tokens
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES

HOST_TOKENS = 40
"""Tokens of the host per token of the device's pool: nothing is to leave the host."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--suite", choices=SUITES, default=SUITES[0], help="recall: for the recall model [texts]")
    made.add_argument("--codec", nargs="+", choices=CODEC_NAMES[1:], default=CODEC_NAMES[1:], help="beside exact")
    made.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.3])
    made.add_argument("--budgets", nargs="+", default=["auto"], help="auto, uniform or profiles [auto]")
    made.add_argument("--scorer", help="[the server's own choice]")
    made.add_argument("--segment", type=int, default=256)
    made.add_argument("--interviews", type=int, default=6, help="contexts with questions, of each kind [6]")
    made.add_argument("--kv-bytes", default="512MiB")
    made.add_argument("--json", type=Path, metavar="FILE.json", help="write results, and a plot beside them")
    return made


def run(options: argparse.Namespace) -> list[Result]:
    """Measure, print, write. Raises BenchmarkError."""
    model, tokenizer = Path(options.model), AutoTokenizer.from_pretrained(options.model)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise SettingsError(f"--json {options.json}: give a file in a folder that exists")
    if options.suite == "recall":
        talks = from_recall(options.interviews, segment=options.segment)
    else:
        talks = from_texts(tokenizer, options.interviews, segment=options.segment)
    head, console, results = load_head(model), Console(), []
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
            reference: Answers | None = None
            for codec in codecs:
                flags = ["--ragged-profile", budgets, "--ragged-host-codec", codec]
                on_device, restored, info = _asked(servers, Pool(ratio), flags, talks, options, progress)
                reference = reference or on_device
                results.append(
                    Result(
                        budgets=Path(budgets).name,
                        ratio=ratio,
                        codec=codec,
                        row_bytes=info["tier"]["row_bytes"],
                        exact_bytes=info["slab_bytes"],
                        segment=options.segment,
                        restored=restored.restored,
                        **differences(head, talks, reference, restored),
                        right=count_right(options.suite, tokenizer, talks, restored),
                        reference_right=count_right(options.suite, tokenizer, talks, reference),
                        start_up=info["summary"],
                    )
                )
                if options.json is not None:
                    write_whole(options.json, json.dumps(document(*_about(options, talks), results), indent=1) + "\n")
                progress.advance(bar)
    table(results).show(console)
    if options.json is not None:
        draw(results, options.json.with_suffix(".png"))
        console.print(f"results and plot: {options.json.with_suffix('')}.*", highlight=False, soft_wrap=True)
    return results


def _asked(
    servers: Started,
    pool: Pool,
    flags: list[str],
    talks: list[Talk],
    options: argparse.Namespace,
    progress: Progress,
) -> tuple[Answers, Answers, dict[str, Any]]:
    """Answers from the device (of exact alone) and restored, and what the server says of itself."""
    name = f"{' '.join(flags[1::2])} at {pool.ratio:g}"
    own = progress.add_task(name, total=2 * len(talks))
    log = (options.json or Path("tier-codecs")).with_suffix(".log")

    def advance() -> None:
        progress.advance(own)

    with naming(name, log), servers.client(pool, 2, log, flags, ready_within_s=CALIBRATION_S) as client:
        exact = flags[-1] == CODEC_NAMES[0]
        on_device = read_contexts(client.url, talks, options.segment, ask=exact, advance=advance)
        restored = go_on_restored(client.url, talks, options.segment, advance)
        info = client.ragged()
    progress.remove_task(own)
    log.unlink(missing_ok=True)
    return on_device, restored, info


def _about(options: argparse.Namespace, talks: list[Talk]) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {
        "model": Path(options.model).resolve().name,
        "suite": options.suite,
        "segment": options.segment,
        "continuations": sum(bool(talk.continuation) for talk in talks),
        "questions": sum(len(talk.questions) for talk in talks),
    }
    return settings, provenance("benchmarks.tier_codecs") | {"machine": describe()}


def main() -> None:
    options = parser().parse_args()
    with command("tier_codecs"), torch.inference_mode():
        run(options)


if __name__ == "__main__":
    main()

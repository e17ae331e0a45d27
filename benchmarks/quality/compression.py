"""What compression costs: changed distributions, changed continuations, lost facts.

With --peers (an environment made by `make peers`), methods of kvpress keep the same share of the same contexts, and
published schemes quantise every token of them.
benchmarks/quality/README.md says what is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.harness.pools import Pool
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars
from benchmarks.quality import reference, tasks
from benchmarks.quality.configuration import UNFITTED, WIDE, Configuration, configurations
from benchmarks.quality.head import head_dim, load_head
from benchmarks.quality.measured import figures
from benchmarks.quality.peering import METHODS, Exact, ask_peers, missing_peers
from benchmarks.quality.quantisers import SCHEMES
from benchmarks.quality.served import hidden_states
from benchmarks.quality.sweep import answers, finish
from benchmarks.quality.table import served as known_servers
from benchmarks.quality.table import tables
from benchmarks.quality.texts import SOURCES, VERIFIED
from sgl_ragged.launch.options import FITTED
from sgl_ragged.mem_pool import slab_format

CHUNK = 4096
"""Tokens that servers prefill at once by default, here. Of what they prefill before, they return no hidden states."""

DEFAULTS = {"segment": 256, "length": 1280, "interviews": 6, "kv_bytes": "512MiB", "output": Path("quality.json")}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scorer", nargs="+", default=["default"], help="[default: the server's own choice]")
    parser.add_argument("--budgets", nargs="+", default=["auto"], help="auto, uniform or profiles by {scorer} [auto]")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.3, 0.2], help="[0.5 0.3 0.2]")
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        default=[WIDE],
        choices=(WIDE, "fp8_e4m3", "fp8_e5m2"),
        help="of the ragged pool; ratio 0.6 in FP8 has the bytes of 0.3 in 16 bits [auto]",
    )
    parser.add_argument(
        "--slab-dtype",
        nargs="+",
        default=[slab_format.WIDE.name],
        choices=tuple(slab_format.FORMATS),
        help="how finished segments are stored; ratios are of a 16-bit cache's bytes [wide]",
    )
    parser.add_argument(
        "--fit",
        nargs="+",
        default=[FITTED],
        choices=(FITTED, UNFITTED),
        help="whether what heads keep is fitted, where profiles have a codebook [auto]",
    )
    tasks.add_options(parser)
    parser.add_argument(
        "--texts", nargs="+", choices=(*SOURCES, *VERIFIED), default=list(SOURCES), help="sources [all but verify-*]"
    )
    parser.add_argument("--context", type=int, default=800, help="tokens of real text in a context with facts [800]")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="interpreter with kvpress, .venv-peers/bin/python")
    names = (*METHODS, *SCHEMES)
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME", help="of the peers [all]")


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError."""
    from transformers import AutoTokenizer

    model = Path(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = tasks.Tasks.of(options, tokenizer, options.context, options.texts)
    settings = {"model": model.resolve().name, **asked.describe()}
    results = Results.open(options.output, "quality", settings)
    wanted = configurations(
        options.scorer, options.budgets, options.ratio, options.kv_cache_dtype, options.slab_dtype, options.fit
    )
    known = known_servers(results)
    missing = [one for one in wanted if one not in known]
    peers = missing_peers(results, options.methods, options.ratio, head_dim(model)) if options.peers else []
    exact = None
    if missing or any(method in SCHEMES for method, _ in peers):
        head = load_head(model)
        states = reference.load(results) if Configuration.token() in known else None
        if states is None:
            missing.insert(0, Configuration.token())
        served = {one: (Pool(one.served_ratio), one.flags(options.segment)) for one in missing}
        common = _common(options.length, options.segment)
        for one, found in answers(options, asked, tokenizer, hidden_states, served, requests=4, common=common):
            if states is None:
                states = found.texts
                reference.keep(results, states)
            results.add(str(one), {"configuration": one, **figures(found, states, head, asked)})
        assert states is not None
        exact = Exact(states, head)
    if peers:
        with bars(Console(stderr=options.json)) as progress:
            ask_peers(options.peers, options.model, asked, tokenizer, peers, exact, results, progress)
    finish(options, results, tables(results))


def _common(length: int, segment: int) -> list[str]:
    """Flags of all servers. Texts are prefilled at once."""
    whole = ["--chunked-prefill-size", str(-(-length // segment) * segment)] if length > CHUNK else []
    return ["--enable-return-hidden-states", *whole]

"""Conversations that pause and come back: time to first token by the tier that they are on.

A first turn of --prompt-length tokens; then other conversations, until it has been evicted; then one more message, of
which the time to first token is taken, one request at a time. Tiers: device (it was not evicted), host
(--enable-hierarchical-cache), disk (the server was restarted), recomputed (no tier below the device). All servers have
the same bytes on the device and on the host, are up at once and take turns. Returns that were not found where they
should be are listed and do not count. Of --pools, token/64 has pages of 64 tokens, and ragged@0.3/recompute is served
with --ragged-restore recompute. benchmarks/multi_turn/returning/README.md says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.options import check_counts, recorded
from benchmarks.harness.pools import Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars
from benchmarks.multi_turn.returning import tables
from benchmarks.multi_turn.returning.results import Returns
from benchmarks.multi_turn.returning.sizes import Heads, PoolPages, needed_to_evict
from benchmarks.multi_turn.returning.stages import TIERS_STAGE, Stages, Traffic
from benchmarks.multi_turn.returning.variants import COMMON, Variant
from sgl_ragged.features.host_tier.restore_schedule import AUTO
from sgl_ragged.mem_pool.sizing import parse_bytes

DEFAULTS = {
    "pools": "token/64,ragged@1,ragged@0.5,ragged@0.3,ragged@0.3/recompute",
    "kv_bytes": "72MiB",
    "seed": 0,
    "output": Path("return.json"),
}

LENGTHS = ("prompt_length", "output_length", "message_length", "returns", "conversations", "segment")


def add_options(parser: argparse.ArgumentParser) -> None:
    made = parser.add_argument_group("--shape return", __doc__)
    made.add_argument("--prompt-length", type=int, default=3200, help="of a first message [3200]")
    made.add_argument("--output-length", type=int, default=16, help="of its answer, exactly [16]")
    made.add_argument("--message-length", type=int, default=32, help="of the message that comes back [32]")
    made.add_argument("--conversations", type=int, default=6, help="that take turns [6]")
    made.add_argument("--returns", type=int, default=5, help="of each cell; from disk once a conversation at most [5]")
    made.add_argument("--segment", type=int, default=256, help="and pages of the token pool [256]")
    made.add_argument("--host-bytes", default="320MiB", help="of a host for all conversations [320MiB]")
    made.add_argument("--no-disk", action="store_true", help="leave out storage and restarts")


def check(options: argparse.Namespace, variants: Sequence[Variant], heads: Heads, traffic: Traffic) -> None:
    """Raises SettingsError for numbers out of range, and where conversations would not be where they should be."""
    check_counts(options, *LENGTHS)
    if len(set(variants)) < len(variants) or variants[0].restore != AUTO:
        raise SettingsError("each pool can be measured once, and the first one is without a way to restore")
    for variant in variants:
        if variant.restore != AUTO and dataclasses.replace(variant, restore=AUTO, marked="") not in variants:
            raise SettingsError(f"{variant} needs {variant.pool.name} beside it, for what recomputing takes")
        pages = PoolPages.of(variant.pool, heads, variant.page, parse_bytes(options.kv_bytes))
        each = traffic.pages_each(variant.page)
        if each < 1:
            raise SettingsError("a conversation has no whole segment: a longer --prompt-length or a shorter --segment")
        longest = traffic.prompt + traffic.answer + traffic.message
        if longest > (pages.device - 1) * pages.page:
            raise SettingsError(
                f"a conversation has {longest} tokens, and {variant} holds {pages.device} pages of {pages.page}: more "
                "--kv-bytes"
            )
        needed = needed_to_evict(pages.device, each)
        if traffic.conversations < needed:
            raise SettingsError(
                f"{variant} holds {pages.device} pages on the device: conversations of {each} are evicted only if "
                f"there are {needed} of them, --conversations {needed}, or with less --kv-bytes"
            )
        if pages.host(parse_bytes(options.host_bytes)) < traffic.conversations * (each + 1):
            raise SettingsError(f"--host-bytes {options.host_bytes} do not hold all conversations of {variant}")


def run(options: argparse.Namespace) -> None:
    """Measure what the file lacks, and print. Raises BenchmarkError."""
    import torch

    on_cpu = not torch.accelerator.is_available()
    variants = [Variant.parse(text, options.segment) for text in options.pools.split(",")]
    heads = Heads.of(options.model, itemsize=4 if on_cpu else 2)
    traffic = Traffic.of(options)
    kv_bytes = parse_bytes(options.kv_bytes)
    check(options, variants, heads, traffic)
    console = Console(stderr=options.json)
    results = Results.open(options.output, "multi_turn.returning", recorded(options))
    if TIERS_STAGE not in results.entries:
        with (
            tempfile.TemporaryDirectory() as folder,
            Started(options.model, options.kv_bytes, COMMON, ()) as started,
            bars(console) as progress,
        ):
            bar = progress.add_task("servers start")

            def advance(text: str) -> None:
                progress.update(bar, advance=1, description=text)

            stages = Stages(
                variants,
                traffic,
                heads,
                kv_bytes,
                started,
                Path(folder),
                advance,
                disk=not options.no_disk,
                on_cpu=on_cpu,
            )
            progress.update(bar, total=stages.steps())
            servers, visits = stages.tiers(parse_bytes(options.host_bytes))
            results.add(TIERS_STAGE, {"servers": servers, "visits": visits})
    returns = Returns.of(results)
    results.show(tables.all_of(returns), console, as_json=options.json)
    for line in tables.strays(returns):
        console.print(f"does not count: {line}", style="red", highlight=False)
    console.print(f"{options.output}", highlight=False)

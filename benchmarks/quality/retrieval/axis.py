"""What fetching back costs and brings, while texts are decoded.

The first part of each text is the prompt; the rest is decoded as it stands, whatever the model would say, so that all
pools decode the same. SGLang's token pool comes first; then the servers of each ratio, with retrieval and without, run
together, and their decode steps are timed in turns. docs/retrieval.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.options import check_counts
from benchmarks.harness.pools import Pool, Started
from benchmarks.harness.results import Results
from benchmarks.harness.sweep import bars, naming
from benchmarks.quality.head import load_head
from benchmarks.quality.retrieval.measured import Measured, measure, states_of, step_times_ms
from benchmarks.quality.retrieval.tables import TOKEN, key, tables
from benchmarks.quality.sweep import finish
from benchmarks.quality.texts import Text, pieces

RATIOS, OVERLAYS = (0.1, 0.15, 0.2, 0.3), (128,)
ITEM_BYTES = 4
"""Of an element of the cache: servers on CPUs compute in float32."""

COMMON = (
    *("--enable-return-hidden-states", "--enable-custom-logit-processor", "--disable-overlap-schedule"),
    # Servers that wait for their turn would take a core each.
    "--sleep-on-idle",
)
"""Flags of all servers."""

DEFAULTS = {"segment": 256, "kv_bytes": "768MiB", "output": Path("retrieval.json")}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, required=True, help="of this model, with roles of heads")
    parser.add_argument("--ratio", type=float, nargs="+", default=list(RATIOS), help=f"{RATIOS}")
    parser.add_argument("--overlay", type=int, nargs="+", default=list(OVERLAYS), help=f"tokens {OVERLAYS}")
    parser.add_argument("--prompt", type=int, default=1536, help="tokens [1536]")
    parser.add_argument("--decoded", type=int, default=256, help="tokens behind the prompt [256]")
    parser.add_argument("--reservoir", default="1GiB", help="host memory for what is dropped [1GiB]")
    parser.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the servers with retrieval")


def groups_of(options: argparse.Namespace) -> list[dict[str, Pool]]:
    """The token pool, and for each ratio a server without retrieval and one with each overlay, which run together."""
    groups = [{TOKEN: Pool(None)}]
    for ratio in options.ratio:
        found = {key(ratio, 0): Pool(ratio)}
        groups.append(found)
        for overlay in options.overlay:
            more = shlex.split(options.ragged_args.replace("--ragged-", ""))
            pairs = tuple(zip(more[::2], more[1::2], strict=True))
            found[key(ratio, overlay)] = Pool(
                ratio, (("reservoir", options.reservoir), ("overlay", str(overlay)), *pairs)
            )
    return groups


def _measure_group(
    servers: Started,
    group: dict[str, Pool],
    texts: Sequence[Text],
    prompt: int,
    head: torch.Tensor,
    reference: Sequence[torch.Tensor] | None,
    log: Path,
) -> tuple[dict[str, Measured], list[torch.Tensor]]:
    """What is measured of servers that run together, one after the other and then in turns; states of the last one.

    Raises ServerLost, ServerFailed and PointFailed.
    """
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(servers.client(pool, len(texts), log.with_stem(f"{log.stem}-{number}")))
            for number, (name, pool) in enumerate(group.items())
        }
        found = {name: measure(client, texts, prompt, head, reference) for name, client in clients.items()}
        times = step_times_ms(clients, texts, prompt)
    measured = {name: dataclasses.replace(one, step_ms=times[name]) for name, (one, _) in found.items()}
    return measured, next(reversed(found.values()))[1]


def row_bytes(model: str) -> int:
    """Of a key and a value of one head."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * head_dim * ITEM_BYTES


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, and print. Raises BenchmarkError."""
    from transformers import AutoTokenizer

    check_counts(options, "segment", "prompt", "decoded", "overlay")
    if not options.profile.is_file():
        raise SettingsError(f"--profile {options.profile}: no such file; make one with python -m calib run")
    texts = pieces(AutoTokenizer.from_pretrained(options.model), options.prompt + options.decoded)
    head = load_head(Path(options.model))
    settings = {
        "model": Path(options.model).resolve().name,
        "profile": options.profile.name,
        **{name: getattr(options, name) for name in ("segment", "prompt", "decoded", "reservoir", "ragged_args")},
        "texts": len(texts),
        "row_bytes": row_bytes(options.model),
    }
    results = Results.open(options.output, "quality.retrieval", settings)
    ragged = ["--ragged-profile", str(options.profile), "--ragged-segment", str(options.segment)]
    log = options.output.with_suffix(".log")
    logs = log.with_stem(f"{log.stem}-*")
    if groups := [group for group in groups_of(options) if not set(group) <= set(results.entries)]:
        with (
            Started(options.model, options.kv_bytes, COMMON, ragged) as servers,
            bars(Console(stderr=options.json)) as progress,
        ):
            task, reference = progress.add_task("servers", total=sum(map(len, groups))), None
            if TOKEN in results.entries:
                with servers.client(Pool(None), len(texts), log) as client:
                    reference = states_of(client, texts, options.prompt)
            for group in groups:
                progress.update(task, description=", ".join(group))
                with naming(", ".join(group), logs):
                    found, states = _measure_group(servers, group, texts, options.prompt, head, reference, log)
                reference = reference or states
                for name, measured in found.items():
                    results.add(name, measured)
                progress.advance(task, len(group))
            for written in (log, *log.parent.glob(logs.name)):
                written.unlink(missing_ok=True)
    finish(options, results, tables(results))

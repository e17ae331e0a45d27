"""What fetching back costs and brings, while a real model decodes real texts.

    python -m benchmarks.retrieval --model models/smollm2-135m --profile gate.safetensors

The first part of each text is the prompt; the rest is decoded as it stands, whatever the model would say, so that all
pools decode the same. SGLang's token pool comes first; then the servers of each ratio, with retrieval and without, run
together, and their decode steps are timed in turns. Writes JSON and a plot, prints a
table. docs/retrieval.md says more.
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoTokenizer

from benchmarks.harness.command import command, provenance
from benchmarks.harness.errors import PointFailed, ServerFailed, ServerLost, SettingsError
from benchmarks.harness.pool_results import TOKEN
from benchmarks.harness.pools import Pool, Started
from benchmarks.quality.head import load_head
from benchmarks.quality.texts import Text, pieces
from benchmarks.retrieval.measured import Measured, measure, states_of, step_times_ms
from benchmarks.retrieval.results import Results, draw, key, table

RATIOS, OVERLAYS = (0.1, 0.15, 0.2, 0.3), (128,)
ITEM_BYTES = 4
"""Of an element of the cache: servers on CPUs compute in float32."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.retrieval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--profile", type=Path, required=True, help="of this model, with roles of heads")
    made.add_argument("--ratio", type=float, nargs="+", default=list(RATIOS), help=f"{RATIOS}")
    made.add_argument("--overlay", type=int, nargs="+", default=list(OVERLAYS), help=f"tokens {OVERLAYS}")
    made.add_argument("--segment", type=int, default=256, help="tokens [256]")
    made.add_argument("--prompt", type=int, default=1536, help="tokens [1536]")
    made.add_argument("--decoded", type=int, default=256, help="tokens behind the prompt [256]")
    made.add_argument("--reservoir", default="1GiB", help="host memory for what is dropped [1GiB]")
    made.add_argument("--kv-bytes", default="768MiB")
    made.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the servers with retrieval")
    made.add_argument("--output", type=Path, default=Path("retrieval.json"))
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


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
    config = AutoConfig.from_pretrained(model).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * head_dim * ITEM_BYTES


def run(options: argparse.Namespace) -> None:
    """Measure what the output file lacks, draw and print. Raises BenchmarkError."""
    if min(options.segment, options.prompt, options.decoded, *options.overlay) < 1:
        raise SettingsError("--segment, --prompt, --decoded and --overlay must be at least 1")
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
    results = Results.open(options.output, settings, provenance("benchmarks.retrieval"))
    groups = [group for group in groups_of(options) if not set(group) <= results.known]
    console = Console(stderr=options.json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    common = ["--enable-return-hidden-states", "--enable-custom-logit-processor", "--disable-overlap-schedule"]
    # Servers that wait for their turn would take a core each.
    common += ["--sleep-on-idle"]
    ragged = ["--ragged-profile", str(options.profile), "--ragged-segment", str(options.segment)]
    log = options.output.with_suffix(".log")
    logs = log.with_stem(f"{log.stem}-*")
    if groups:
        with (
            Started(options.model, options.kv_bytes, common, ragged) as servers,
            Progress(*columns, console=console) as progress,
        ):
            task, reference = progress.add_task("servers", total=sum(map(len, groups))), None
            if TOKEN in results.known:
                with servers.client(Pool(None), len(texts), log) as client:
                    reference = states_of(client, texts, options.prompt)
            for group in groups:
                progress.update(task, description=", ".join(group))
                try:
                    found, states = _measure_group(servers, group, texts, options.prompt, head, reference, log)
                except ServerLost as error:
                    raise ServerLost(f"a server of {', '.join(group)} is gone ({error}); the logs are {logs}") from None
                except (PointFailed, ServerFailed) as error:
                    reason = error.reason if isinstance(error, ServerFailed) else error
                    raise SettingsError(f"{', '.join(group)}: {reason}; the logs are {logs}") from None
                reference = reference or states
                results.pools |= found
                results.write()
                progress.advance(task, len(group))
            for written in (log, *log.parent.glob(logs.name)):
                written.unlink(missing_ok=True)
    draw(results, options.output.with_suffix(".png"))
    if options.json:
        print(results.text(), end="")
    else:
        table(results).show(console)
    console.print(f"results and plot: {options.output.with_suffix('')}.*", highlight=False, soft_wrap=True)


def main() -> None:
    options = parser().parse_args()
    with command("retrieval"):
        run(options)


if __name__ == "__main__":
    main()

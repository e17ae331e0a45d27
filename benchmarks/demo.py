"""Several multi-turn conversations at once, on the ragged pool and on SGLang's own pool with the same KV bytes.

    python -m benchmarks demo [--json] [--ratio 0.3] [--kv-bytes 48MiB]

Facts are stated in early turns and asked for in later ones, through the OpenAI-compatible API. The same
conversations run on both pools, one server after the other; prints one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.launch import serve
from benchmarks.harness.options import new_parser
from benchmarks.harness.sweep import bars
from benchmarks.harness.table import Table
from benchmarks.recall.task import Conversation, conversation
from sgl_ragged.mem_pool.slab_format import CODED_RATIO

MODEL = Path(__file__).parent / "recall" / "checkpoint"
PROFILE = MODEL.parent / "keydiff-coverage.safetensors"
POOLS = ("ragged", "token")


@dataclass(frozen=True)
class TurnResult:
    """One answered turn of one conversation. Times in seconds, lengths in tokens."""

    turn: int
    prompt: int
    cached: int
    ttft_s: float
    right: bool


@dataclass(frozen=True)
class PoolResult:
    """One pool's run: what it holds, and all its turns.

    budgets: least, median and most tokens that a head keeps of a segment; None for the token pool.
    """

    pool: str
    virtual_tokens: int
    wall_s: float
    turns: tuple[TurnResult, ...]
    start_up: str
    budgets: tuple[float, float, float] | None


def server_args(pool: str, kv_bytes: str, ratio: float, requests: int) -> list[str]:
    """Arguments of the server under test; the two pools differ in --kv-pool and --ragged-ratio alone."""
    args = ["--dtype", "bfloat16", "--kv-bytes", kv_bytes, "--max-running-requests", str(requests)]
    args += ["--enable-cache-report", "--kv-pool", pool]
    return args + (["--ragged-ratio", str(ratio), "--ragged-profile", str(PROFILE)] if pool == "ragged" else [])


def answer_turn(client: Any, messages: list[dict], right: str, turn: int) -> tuple[str, TurnResult]:
    """Stream one answer; returns it and what was measured."""
    started = time.perf_counter()
    first, words, usage = None, [], None
    stream = client.chat.completions.create(
        model="recall",
        messages=messages,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            words.append(chunk.choices[0].delta.content)
        usage = chunk.usage or usage
    text = "".join(words).strip()
    details = usage.prompt_tokens_details
    return text, TurnResult(
        turn=turn,
        prompt=usage.prompt_tokens,
        cached=details.cached_tokens if details else 0,
        ttft_s=(first or time.perf_counter()) - started,
        right=text.split()[:1] == [right],
    )


def run_pool(pool: str, talks: list[Conversation], options: argparse.Namespace, log: Path, progress: Progress):
    """Start a server with the pool, hold all conversations turn by turn, stop it."""
    from openai import OpenAI  # it takes a second to import

    task = progress.add_task(f"{pool}: starting the server", total=len(talks) * options.turns)
    args = server_args(pool, options.kv_bytes, options.ratio, options.conversations)
    with serve(MODEL, *args, log=log) as server:
        progress.update(task, description=f"{pool}: {options.conversations} conversations")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        histories: list[list[dict]] = [[] for _ in talks]
        turns: list[TurnResult] = []
        started = time.perf_counter()

        def speak(index: int, turn: int) -> TurnResult:
            messages = histories[index]
            messages.append({"role": "user", "content": talks[index].turns[turn].user})
            text, result = answer_turn(client, messages, talks[index].turns[turn].answer, turn)
            messages.append({"role": "assistant", "content": text})
            progress.advance(task)
            return result

        with ThreadPoolExecutor(len(talks)) as threads:
            for turn in range(options.turns):
                turns += threads.map(lambda index, turn=turn: speak(index, turn), range(len(talks)))
        wall_s = time.perf_counter() - started
        with ServerClient(server.url) as asked:
            virtual_tokens, start_up_line, ragged = asked.pool_tokens(), asked.start_up_line(), asked.ragged()
        progress.update(task, description=f"{pool}: done")
        budgets = tuple(ragged[f"kept_{name}"] for name in ("min", "median", "max")) if ragged else None
        return PoolResult(pool, virtual_tokens, wall_s, tuple(turns), start_up_line, budgets)


def mean(values) -> float:
    return statistics.fmean(list(values))


def show(results: list[PoolResult], options: argparse.Namespace, console: Console) -> None:
    """One table: per turn and pool, cached prompt tokens, time to first token and recall."""
    columns = ["turn", "prompt tokens"]
    for result in results:
        label = f"ragged {options.ratio}" if result.pool == "ragged" else "token"
        columns += [f"{label}: cached", "TTFT ms", "recall"]
    rows = []
    for turn in range(options.turns):
        each = [[one for one in result.turns if one.turn == turn] for result in results]
        rows.append([str(turn + 1), f"{mean(one.prompt for one in each[0]):.0f}"])
        for own in each:
            rows[-1] += [f"{mean(one.cached for one in own):.0f}", *_times_and_recall(own)]
    rows.append(["all", ""])
    for result in results:
        rows[-1] += [f"{_cached_share(result):.0%}", *_times_and_recall(result.turns)]
    title = f"{options.conversations} conversations at once, {options.kv_bytes} of KV for either pool"
    Table(title, columns, rows).show(console)
    for result in results:
        console.print(
            f"{result.pool}: {result.virtual_tokens} virtual tokens in {options.kv_bytes} of KV", highlight=False
        )
    console.print(results[0].start_up, style="dim", highlight=False)
    console.print(claim(results, options), highlight=False)


def _times_and_recall(turns: Sequence[TurnResult]) -> tuple[str, str]:
    return f"{1000 * mean(one.ttft_s for one in turns):.0f}", f"{mean(one.right for one in turns):.2f}"


def _cached_share(result: PoolResult) -> float:
    return sum(one.cached for one in result.turns) / sum(one.prompt for one in result.turns)


def claim(results: list[PoolResult], options: argparse.Namespace) -> str:
    """Describe the result in two lines: the budgets, then the gain over SGLang's pool."""
    ragged, token = (next(result for result in results if result.pool == pool) for pool in POOLS)
    assert ragged.budgets is not None, "the ragged pool has budgets"
    least, median, most = ragged.budgets
    gain = ragged.virtual_tokens / token.virtual_tokens
    recall = [mean(turn.right for turn in result.turns) for result in (ragged, token)]
    found = [_cached_share(result) for result in (ragged, token)]
    return (
        f"budgets: heads keep {least:g} (least), {median:g} (median), {most:g} (most) tokens of a segment; a "
        f"16-bit cache would hold {token.virtual_tokens} tokens\n"
        f"In the same {options.kv_bytes} the ragged pool holds {gain:.1f} times as many tokens, finds {found[0]:.0%} "
        f"of prompt tokens in the cache (token pool {found[1]:.0%}) and answers {recall[0]:.0%} of the questions right "
        f"(token pool {recall[1]:.0%})."
    )


def main() -> None:
    parser = new_parser("demo", __doc__)
    parser.add_argument("--conversations", type=int, default=6, help="held at once [6]")
    parser.add_argument("--turns", type=int, default=8, help="turns of each conversation [8]")
    parser.add_argument("--tokens-per-turn", type=int, default=320, help="length of a turn [320]")
    parser.add_argument(
        "--ratio", type=float, default=CODED_RATIO, help=f"kept / full KV bytes of the ragged pool [{CODED_RATIO}]"
    )
    parser.add_argument("--kv-bytes", default="48MiB", help="KV budget of either pool [48MiB]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    options = parser.parse_args()
    with command("demo"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Hold the conversations on both pools and print what was measured. Raises BenchmarkError."""
    console = Console(stderr=options.json)
    talks = [
        conversation(options.seed + number, options.turns, options.tokens_per_turn)
        for number in range(options.conversations)
    ]
    with tempfile.TemporaryDirectory() as folder, bars(console) as progress:
        results = [run_pool(pool, talks, options, Path(folder) / f"{pool}.log", progress) for pool in POOLS]
    if options.json:
        print(json.dumps({"options": vars(options), "results": [asdict(result) for result in results]}, indent=2))
    else:
        show(results, options, console)


if __name__ == "__main__":
    main()

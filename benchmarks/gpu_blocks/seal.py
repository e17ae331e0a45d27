"""Block `seal`: score, choose and gather for a chunk of one layer, and for what decode has left pending in all layers.

A chunk's seals are set against the layer's prefill: its matrix products and the attention, timed in the same turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_blocks.arithmetic import mean_work, seal_work
from benchmarks.gpu_blocks.cases import PREFILL_RATIO, SEAL_CASE, ExtendCase, SealCase, kept_counts
from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.extend import Chunks
from benchmarks.gpu_blocks.stage import FALLBACK_RESIDENT, make_stage
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call
from sgl_ragged.attention.kernels import seal
from sgl_ragged.mem_pool.segments import InTails
from sgl_ragged.mem_pool.tails import NOW

PREFIX = 32 * 1024
HIDDEN, FEED_FORWARD = 4096, 14336
"""Widths of Llama-3.1-8B."""


def run(
    context: Context,
    case: SealCase = SEAL_CASE,
    prefix: int = PREFIX,
    hidden: int = HIDDEN,
    feed_forward: int = FEED_FORWARD,
) -> Iterator[Row]:
    rows = [*_chunk_rows(context, case, prefix, hidden, feed_forward)]
    context.release()
    rows += _pending_rows(context, case)
    columns = ("case", "us", "GB/s", "% of copy", "% of the layer's prefill")
    shown = ("case", "median_us", "gb_per_s", "percent_of_copy", "percent_of_prefill")
    show("seal", columns, [[row.get(key) for key in shown] for row in rows])
    yield from rows


def _chunk_rows(context: Context, case: SealCase, prefix: int, hidden: int, feed_forward: int) -> Iterator[Row]:
    model = case.model
    chunks = Chunks(context, ExtendCase(model, prefix, case.chunk), PREFILL_RATIO)
    store, kept = chunks.operations.store, chunks.kept
    shape = (case.chunk, model.heads, model.head_dim)
    keys, values = torch.randn((2, *shape), device=context.device).to(context.dtype)
    firsts = torch.arange(0, case.chunk, model.segment, dtype=torch.int32, device=context.device)
    slots = chunks.table[1, prefix :: model.segment][: case.segments] // model.segment
    source, numbers = seal.Source.of_chunk(keys, values, firsts), torch.ones_like(firsts)
    by_layer = [
        (
            torch.tensor(row, dtype=torch.int32, device=context.device),
            torch.tensor(store.layout.key_offset[layer] // 16, device=context.device),
            int(row.max()),
        )
        for layer, row in enumerate(kept)
    ]

    def sealing(scorer: str) -> Call:
        def call() -> None:
            for counts, key_blocks, most in by_layer:
                scores = seal.score(source, scorer, model.segment, model.head_dim)
                positions = seal.choose(scores, numbers, counts)
                seal.gather(source, store.slabs, slots, positions, counts, key_blocks, most, model.head_dim)

        return call

    products = _products(context, case.chunk, hidden, feed_forward, model.heads, model.q_per_kv, model.head_dim)
    variants: dict[str, Call] = {scorer: sealing(scorer) for scorer in case.scorers}
    variants |= {"matrix products of the layer": products, "attention of the chunk": chunks.attend}
    calls = {name: len(kept) for name in variants} | {"matrix products of the layer": 1}
    times = context.timer.compare({n: context.timer.prepare(call) for n, call in variants.items()}, calls)
    prefill = times["matrix products of the layer"].median + times["attention of the chunk"].median
    for name, taken in times.items():
        row: Row = {"case": f"{name}, {case.chunk} tokens, one layer", **taken.summary()}
        if name in case.scorers:
            work = mean_work([seal_work(model, case.segments, counts[None], name) for counts in kept])
            row |= {"segments": case.segments, **_rate(context, work.bytes, taken.median)}
        yield {**row, "percent_of_prefill": 100 * taken.median / prefill}


def _products(
    context: Context, tokens: int, hidden: int, feed_forward: int, heads: int, q_per_kv: int, dim: int
) -> Call:
    """The matrix products of one layer: QKV, output, gate and up, down."""
    queries = heads * q_per_kv * dim
    widths = (
        (hidden, queries + 2 * heads * dim),
        (queries, hidden),
        (hidden, 2 * feed_forward),
        (feed_forward, hidden),
    )
    pairs = [
        tuple(torch.randn(shape, device=context.device).to(context.dtype) for shape in ((tokens, a), (a, b)))
        for a, b in widths
    ]

    def call() -> None:
        for left, right in pairs:
            left @ right

    return call


def _pending_rows(context: Context, case: SealCase) -> Iterator[Row]:
    """Segments that decode has filled, over all layers: `SlabStore.flush_pending_seals`."""
    model = case.model
    kept = kept_counts(model, PREFILL_RATIO, all_layers=True)
    most = max(case.pending)
    variants: dict[str, Call] = {}
    counts: list[int] = []
    # Of one with kernels, and of one whose scores lie beside keys and values.
    for scorer in (case.scorers[0], "gate"):
        stage = make_stage(
            kept,
            model.head_dim,
            model.q_per_kv,
            model.segment,
            most,
            model.segment,
            context.dtype,
            context.device,
            scorer,
        )
        operations = stage.operations("exact", FALLBACK_RESIDENT, 1)
        for count in case.pending:
            rows, tails = torch.arange(1, count + 1, device=context.device), stage.store.tails
            pending = InTails(
                req_pool_indices=rows,
                pages=tails.pages(rows, tails.stages(rows, NOW), NOW),
                slots=(stage.table[1 : count + 1, 0] // model.segment).long(),
                segment_indices=torch.zeros(count, dtype=torch.int64, device=context.device),
            )

            def call(operations=operations, pending=pending) -> None:
                operations.store.defer_seals(pending)
                operations.store.flush_pending_seals()

            variants[f"{count} pending, {scorer}, {len(kept)} layers"] = call
            counts.append(count)
    times = context.timer.compare({name: context.timer.prepare(call) for name, call in variants.items()})
    for (name, taken), count in zip(times.items(), counts, strict=True):
        work = seal_work(model, count, kept, case.scorers[0], staged=True)
        yield {"case": name, "segments": count, **taken.summary(), **_rate(context, work.bytes, taken.median)}


def _rate(context: Context, moved: int, microseconds: float) -> Row:
    rate = moved / microseconds * 1e6
    return {"gb_per_s": rate / 1e9, "percent_of_copy": context.percent_of_copy(rate)}

"""Block `extend`: one layer's attention of prefill chunks, against an uncompressed cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks.gpu_blocks import flashinfer_calls
from benchmarks.gpu_blocks.arithmetic import Work, extend_work, mean_work
from benchmarks.gpu_blocks.cases import EXTEND_CASES, PREFILL_RATIO, RATIOS, ExtendCase, Model, kept_counts
from benchmarks.gpu_blocks.context import Context, Row, short_error
from benchmarks.gpu_blocks.full_cache import Attend, FullCache, extend_baselines, working
from benchmarks.gpu_blocks.stage import FALLBACK_RESIDENT, make_stage
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call, Times
from sgl_ragged.attention.occupancy import resident_ctas


class Chunks:
    """A stage whose requests have the history of a case, and what a chunk of each brings.

    attend: the attention of the chunks in each layer. whole: all of extend: append, seal and attention.
    chunk_ctas: as `TritonOps` takes it; with 0 heads are left whole, however short the chunk.
    """

    def __init__(self, context: Context, case: ExtendCase, ratio: float, chunk_ctas: int = 0) -> None:
        model = case.model
        self.kept = kept_counts(model, ratio)
        layers = range(len(self.kept))
        stage = make_stage(
            self.kept,
            model.head_dim,
            model.q_per_kv,
            model.segment,
            case.requests,
            case.length,
            context.dtype,
            context.device,
        )
        self.operations = stage.operations("exact", FALLBACK_RESIDENT, case.requests, chunk_ctas)
        rows = torch.arange(1, case.requests + 1, device=context.device)
        self.rows, self.table = rows, stage.table
        prefixes, lengths = [case.prefix] * case.requests, [case.chunk] * case.requests
        self.batch = self.operations.describe_extend(stage.table, rows, prefixes, lengths)
        shape = (case.tokens, model.heads)
        self.queries = torch.randn((*shape, model.q_per_kv, model.head_dim), device=context.device).to(context.dtype)
        keys, values = torch.randn((2, *shape, model.head_dim), device=context.device).to(context.dtype)
        output = torch.empty_like(self.queries)

        def attend() -> None:
            for layer in layers:
                self.operations.attend_chunks(layer, self.queries, keys, values, self.batch, output)

        def whole() -> None:
            for layer in layers:
                self.operations.extend(layer, self.queries, keys, values, self.batch)

        self.attend: Call = attend
        self.whole: Call = whole


def resident_chunk_ctas(context: Context, model: Model) -> int:
    """CTAs of the extend kernel that the device holds at once, for this model's shapes; asked once."""
    shape = (model.heads, model.q_per_kv, model.head_dim)
    if shape not in context.chunk_residents:
        chunks = Chunks(context, ExtendCase(model, model.segment, model.segment), PREFILL_RATIO)
        keys = chunks.queries[:, :, 0].contiguous()
        kernel = chunks.operations.attend_chunks(
            0, chunks.queries, keys, keys, chunks.batch, torch.empty_like(chunks.queries)
        )
        context.chunk_residents[shape] = FALLBACK_RESIDENT if kernel is None else resident_ctas(kernel, context.device)
    return context.chunk_residents[shape]


def run(
    context: Context, cases: Iterable[ExtendCase] = EXTEND_CASES, ratios: tuple[float, ...] = RATIOS
) -> Iterator[Row]:
    for case in context.within_time(cases):
        try:
            row = _measure(context, case, ratios)
        except torch.OutOfMemoryError as error:
            context.skip(case.name, short_error(error))
            continue
        show_row(row)
        yield row


def _measure(context: Context, case: ExtendCase, ratios: tuple[float, ...]) -> Row:
    model = case.model
    prepared: dict[str, Call] = {}
    calls: dict[str, int] = {}
    ours: dict[str, Row] = {}
    works: dict[str, Work] = {}
    chunk_ctas = resident_chunk_ctas(context, model)
    for ratio in ratios:
        chunks = Chunks(context, case, ratio, chunk_ctas)
        work = mean_work([extend_work(case, row) for row in chunks.kept])
        variants = {f"ours {ratio:g}": chunks.attend, f"ours {ratio:g}, with append and seal": chunks.whole}
        if chunks.batch.scratch is not None:
            variants[f"ours {ratio:g}, heads whole"] = Chunks(context, case, ratio).attend
        for name, call in variants.items():
            prepared[name], calls[name] = context.timer.prepare(call), len(chunks.kept)
            works[name] = work
            ours[name] = {"name": name, "ratio": ratio, "bytes": work.bytes, "flop": work.flop}
    full = extend_work(case, None)
    cache = FullCache(context, 2, case.requests, case.length, model.heads, model.head_dim)
    shape = (case.requests, model.heads * model.q_per_kv, case.chunk, model.head_dim)
    queries = torch.randn(shape, device=context.device).to(context.dtype)
    found = extend_baselines(cache, queries)
    failed: list[Row] = []
    if context.flashinfer is not None:
        try:
            found["flashinfer"] = flashinfer_calls.full_extend(context.flashinfer, cache, queries, model.heads)
        except Exception as error:
            failed.append({"name": "flashinfer", "failed": short_error(error)})
    runs, baselines = working(found, context)
    for name, attend in runs.items():

        def theirs(attend: Attend = attend) -> None:
            for call in range(cache.calls):
                attend(call)

        prepared[name], calls[name] = context.timer.prepare(theirs), cache.calls
    times = context.timer.compare(prepared, calls)
    for baseline in baselines:
        if baseline["baseline"] in times:
            baseline |= _speed(context, times[baseline["baseline"]], full)
    fastest = min((b for b in baselines if "median_us" in b), key=lambda b: b["median_us"], default=None)
    for name, entry in ours.items():
        entry |= _speed(context, times[name], works[name])
        if fastest is not None:
            entry["speedup"] = fastest["median_us"] / entry["median_us"]
            entry["speedup_over_ideal"] = entry["speedup"] * works[name].flop / full.flop
    return {
        "case": case.name,
        "tokens": case.tokens,
        "full_bytes": full.bytes,
        "full_flop": full.flop,
        "best_baseline": fastest and fastest["baseline"],
        "ours": list(ours.values()),
        "baselines": baselines,
        "failed": failed,
    }


def _speed(context: Context, times: Times, work: Work) -> Row:
    rate = work.flop / (times.median * 1e-6)
    return {**times.summary(), "tflop_per_s": rate / 1e12, "percent_of_matmul": context.percent_of_matmul(rate)}


def show_row(row: Row) -> None:
    keys = ("name", "median_us", "gflop", "tflop_per_s", "percent_of_matmul", "speedup", "speedup_over_ideal")
    lines = [[{**e, "gflop": e["flop"] / 1e9}.get(key) for key in keys] for e in row["ours"]]
    for entry in row["baselines"]:
        if "median_us" in entry:
            figures = [entry["median_us"], row["full_flop"] / 1e9, entry["tflop_per_s"], entry["percent_of_matmul"]]
            lines.append(["full KV: " + entry["baseline"], *figures, None, None])
        else:
            lines.append([f"full KV: {entry['baseline']}: {entry['failed'][:60]}", *[None] * 6])
    columns = ("variant", "us a layer", "GFLOP", "TFLOP/s", "% of matmul", "speed-up", "over FLOP ratio")
    show(f"extend: {row['case']}; best baseline: {row['best_baseline']}", columns, lines)

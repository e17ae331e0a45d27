"""Block `beside`: what steps do beside attention: descriptions, gates, sinks, overlays, fitting, copies to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.gpu_blocks.cases import BESIDE_CASE, PREFILL_RATIO, BesideCase, kept_counts
from benchmarks.gpu_blocks.context import Context, Row, short_error
from benchmarks.gpu_blocks.stage import FALLBACK_RESIDENT, Stage, make_stage
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call
from sgl_ragged.attention.kernels import append, describe, gate, row_copy
from sgl_ragged.attention.view import DecodeView
from sgl_ragged.features.retrieval import drift
from sgl_ragged.features.retrieval.overlay import attend_overlay
from sgl_ragged.features.retrieval.settings import CANDIDATES
from sgl_ragged.mem_pool.segments import InChunk, InTails
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.scorers.gate import FoldedGate, Gate

Timed = tuple[Call, int]
"""A call, and the bytes that it has to move."""


def run(context: Context, case: BesideCase = BESIDE_CASE) -> Iterator[Row]:
    for part in (_steps, _gates, _fitting, _transfers):
        rows = list(_measured(context, part(context, case)))
        columns = ("case", "us", "GB/s", "% of copy")
        show("beside", columns, [[r["case"], *map(r.get, ("median_us", "gb_per_s", "percent_of_copy"))] for r in rows])
        yield from rows
        context.release()


def _measured(context: Context, calls: Iterator[tuple[str, Timed]]) -> Iterator[Row]:
    prepared: dict[str, Call] = {}
    moved: dict[str, int] = {}
    for name, (call, count) in calls:
        try:
            prepared[name], moved[name] = context.timer.prepare(call), count
        except Exception as error:
            # What cannot be captured has no figure here.
            context.skip(name, short_error(error))
    for name, times in context.timer.compare(prepared).items():
        rate = moved[name] / (times.median * 1e-6)
        yield {
            "case": name,
            **times.summary(),
            "bytes": moved[name],
            "gb_per_s": rate / 1e9,
            "percent_of_copy": context.percent_of_copy(rate),
        }


def _stage(
    context: Context,
    case: BesideCase,
    requests: int,
    tokens: int,
    scorer: str = "keydiff",
    codebook: Mapping[str, torch.Tensor] | None = None,
) -> Stage:
    model = case.model
    shape = model.head_dim, model.q_per_kv, model.segment
    kept = kept_counts(model, PREFILL_RATIO)
    return make_stage(kept, *shape, requests, tokens, context.dtype, context.device, scorer, codebook=codebook)


def _steps(context: Context, case: BesideCase) -> Iterator[tuple[str, Timed]]:
    """Of one step: its description, and one layer's sinks, overlays, and a pivot's question."""
    model, batch = case.model, max(case.batches)
    stage = _stage(context, case, batch, case.context)
    operations = stage.operations("exact", FALLBACK_RESIDENT, batch)
    tails, lengths = stage.store.tails, torch.full((batch,), case.context, device=context.device)
    rows = torch.arange(1, batch + 1, device=context.device)
    view = DecodeView.empty(batch, stage.max_segments, tails)
    for count in case.batches:

        def described(count: int = count) -> None:
            describe.describe(stage.table, rows[:count], lengths[:count], tails.table, model.segment, view)

        yield f"description of {count} requests", (described, 8 * count * (case.context // model.segment))
    described_batch = operations.describe_decode(stage.table, rows, lengths, lengths.cpu())
    shape = (batch, model.heads, model.q_per_kv, model.head_dim)
    queries = torch.randn(shape, device=context.device).to(context.dtype)
    sinks = torch.zeros(model.heads * model.q_per_kv, dtype=context.dtype, device=context.device)
    read = batch * case.context // model.segment * int(stage.store.layout.kept[0].sum()) * 2 * model.head_dim * 2
    keys = queries[:, :, 0].contiguous()
    for name, more in (("", ()), (", with sinks", (None, None, sinks))):

        def attended(more: tuple = more) -> None:
            operations.decode(0, queries, keys, keys, described_batch, *more)

        yield f"attention of {batch}, {case.context} tokens{name}", (attended, read)
    chunk = operations.describe_extend(stage.table, rows[:1], [case.context - case.chunk], [case.chunk])
    asking = torch.randn((case.chunk, *shape[1:]), device=context.device).to(context.dtype)
    keys, values = torch.randn((2, case.chunk, model.heads, model.head_dim), device=context.device).to(context.dtype)
    output = torch.empty_like(asking)
    seen = read // batch + 2 * keys.nbytes
    for name, learned in (("", None), (", with sinks", sinks)):

        def attended_to(learned: torch.Tensor | None = learned) -> None:
            operations.attend_chunks(0, asking, keys, values, chunk, output, None, learned)

        yield (
            f"attention of a chunk of {case.chunk} behind {case.context - case.chunk} tokens{name}",
            (attended_to, seen),
        )
    fetched = torch.randn((batch, model.heads, case.overlay, 2 * model.head_dim), device=context.device)
    fetched = fetched.to(context.dtype)
    counts = torch.full((batch, model.heads), case.overlay, dtype=torch.int32, device=context.device)
    yield (
        f"overlays of {batch} requests, one layer",
        (lambda: attend_overlay(queries, fetched, counts, 0.1), fetched.nbytes),
    )
    watched = torch.randn((case.context, model.head_dim), device=context.device).to(context.dtype)
    recent = queries.new_zeros(case.interval, *shape[2:])
    sums = torch.ones(recent.shape[:2], device=context.device)

    def asked() -> None:
        weights = drift.attended(recent, sums, watched, 0.1, case.context - case.interval)
        drift.candidates(weights, CANDIDATES * case.overlay)
        drift.top_tokens(weights, case.overlay)

    yield f"what a pivot attended to of {case.context} tokens", (asked, watched.nbytes)


def _gates(context: Context, case: BesideCase) -> Iterator[tuple[str, Timed]]:
    """One layer's scores of tokens: in decode with their keys and values, in prefill alone."""
    model, device = case.model, context.device
    made = {"input_mean": (1, case.hidden), "input_scale": (1, case.hidden), "hidden": (1, case.features, case.hidden)}
    made |= {"hidden_bias": (1, case.features), "skip": (model.heads, case.hidden)}
    own = {name: torch.randn(shape, device=device) for name, shape in made.items()}
    own["output"] = torch.randn((model.heads, case.features), device=device)
    folded, scorer = FoldedGate.of(own), Gate()
    stage = _stage(context, case, max(case.batches), model.segment, "gate")
    tails = stage.store.tails
    for count in (*case.batches, case.chunk):
        states = torch.randn((count, case.hidden), device=device).to(context.dtype)
        bytes_read = folded.weights.nbytes + states.nbytes

        def folded_scores(states: torch.Tensor = states) -> None:
            gate.gate_scores(folded.features(states), folded.output)

        yield f"gate, {count} tokens", (folded_scores, bytes_read)
        yield f"gate in torch, {count} tokens", (lambda states=states: scorer.token_scores(states, own), bytes_read)
    for count in case.batches:
        keys, values = torch.randn((2, count, model.heads, model.head_dim), device=device).to(context.dtype)
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        pages = tails.table[1 : count + 1, 0].contiguous()
        inputs = append.GateInputs(torch.ones((count, len(folded.weights)), device=device), folded.output, tails.inputs)

        def appended(keys=keys, values=values, numbers=numbers, pages=pages, inputs=inputs) -> None:
            append.append(tails.data, 0, keys, values, numbers, numbers, numbers, pages, gate=inputs)

        yield f"append with gate, {count} requests", (appended, 4 * keys.nbytes + inputs.features.nbytes)


def _fitting(context: Context, case: BesideCase) -> Iterator[tuple[str, Timed]]:
    """A chunk's segments of one layer, one that decode has filled in all layers; sealed with and without a codebook."""
    model, device = case.model, context.device
    count = case.chunk // model.segment
    keys, values = torch.randn((2, case.chunk, model.heads, model.head_dim), device=device).to(context.dtype)
    firsts = torch.arange(0, case.chunk, model.segment, dtype=torch.int32, device=device)
    for name in ("sealed", "sealed and fitted"):
        codebook = None
        if name != "sealed":
            shape = (model.heads, case.queries)
            codebook = {
                QUERIES: torch.randn((*shape, model.head_dim), device=device).half(),
                MASSES: torch.randn((model.heads, 2, case.queries), device=device),
                OUTPUTS: torch.randn((model.heads, 2, case.queries, model.head_dim), device=device).half(),
                ROPE[0]: torch.rand((1, model.head_dim // 2), device=device).double(),
                ROPE[1]: torch.arange(model.head_dim, device=device)[None],
            }
        stage = _stage(context, case, 1, case.chunk, codebook=codebook)
        store = stage.store
        stage.operations("exact", FALLBACK_RESIDENT, 1)
        chunk = InChunk(
            firsts, stage.table[1, :: model.segment] // model.segment, firsts // model.segment, keys, values, None
        )

        def sealed(store=store, chunk=chunk) -> None:
            store.seal(0, chunk)

        yield f"{count} segments {name}, one layer", (sealed, 2 * keys.nbytes)
        row = torch.ones(1, dtype=torch.int64, device=device)
        filled = InTails(row, store.tails.table[1:2, 0].contiguous(), row, torch.zeros_like(row))

        def sealed_behind_decode(store=store, filled=filled) -> None:
            store.seal(None, filled)

        layers, of_layer = store.layout.num_layers, 2 * keys.nbytes // count
        yield f"1 segment {name}, {layers} layers", (sealed_behind_decode, layers * of_layer)


def _transfers(context: Context, case: BesideCase) -> Iterator[tuple[str, Timed]]:
    """Slabs to pinned rows of the host and back, by kernels of some programs; and one plain copy of as many bytes."""
    model, device = case.model, context.device
    stage = _stage(context, case, case.slabs, model.segment)
    slabs = stage.store.slabs
    width = slabs.shape[1] * slabs.element_size()
    host = torch.zeros((case.slabs, width), dtype=torch.uint8, pin_memory=device.type == "cuda")
    slots, rows = torch.arange(1, case.slabs + 1, device=device), torch.arange(case.slabs, device=device)
    some = slabs[1 : case.slabs + 1].view(torch.uint8)
    yield "slabs to the host, plain copy", (lambda: host.copy_(some, non_blocking=True), host.nbytes)
    yield "slabs from the host, plain copy", (lambda: some.copy_(host, non_blocking=True), host.nbytes)
    for programs in case.programs:

        def out(programs: int = programs) -> None:
            row_copy.copy_rows(slabs, host, slots, rows, (0, width), 0, programs)

        def back(programs: int = programs) -> None:
            row_copy.copy_rows(host, slabs, rows, slots, (0, width), 0, programs)

        yield f"slabs to the host, {programs} programs", (out, host.nbytes)
        yield f"slabs from the host, {programs} programs", (back, host.nbytes)

"""Blocks `decode` and `formats`: one layer's decode attention against an uncompressed cache, by method of the CTA map
and ratio, and by what slabs hold.

What is timed is attention, ours in both its launches, which write the new token's key and value, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks.gpu_blocks import flashinfer_calls
from benchmarks.gpu_blocks.arithmetic import DecodeExtent, decode_work, fit_decode, full_decode_work, mean_work
from benchmarks.gpu_blocks.cases import DECODE_CASES, FORMAT_CASES, NARROW_SLABS, WIDE_SLABS, DecodeCase, Slabs
from benchmarks.gpu_blocks.context import Context, Row, short_error
from benchmarks.gpu_blocks.full_cache import Attend, FullCache, decode_baselines, distance, working
from benchmarks.gpu_blocks.stage import FALLBACK_RESIDENT, Stage, make_stage, measured_residents
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call, Times
from sgl_ragged.attention.kernel_choice import check_cache, device_capability
from sgl_ragged.errors import RaggedConfigError

MOST_PLANNED = 8
"""Most batches with FlashInfer: each distinct n takes a FlashInfer plan, and making these takes long."""


def run(
    context: Context, cases: Iterable[DecodeCase] = DECODE_CASES, variants: tuple[Slabs, ...] = WIDE_SLABS
) -> Iterator[Row]:
    for case in context.within_time(cases):
        extent = fit_decode(case, variants, context.memory, replay_bytes=context.replay_bytes)
        if isinstance(extent, str):
            context.skip(case.name, extent)
            continue
        try:
            row = _Comparison(context, case, extent).measure()
        except torch.OutOfMemoryError as error:
            context.skip(case.name, short_error(error))
            continue
        show_row(row)
        yield row


def run_formats(context: Context) -> Iterator[Row]:
    return run(context, FORMAT_CASES, NARROW_SLABS)


class _Comparison:
    """All variants of one case, in memory together so that they can take turns."""

    def __init__(self, context: Context, case: DecodeCase, extent: DecodeExtent) -> None:
        self.context, self.case, self.extent = context, case, extent
        model = case.model
        shape = (case.batch, model.heads, model.q_per_kv, model.head_dim)
        self.queries = torch.randn(shape, device=context.device).to(context.dtype)
        self.keys = self.queries[:, :, 0].contiguous()
        self.prepared: dict[str, Call] = {}
        self.calls: dict[str, int] = {}
        self.ours: list[Row] = []
        self.failed: list[Row] = []

    def measure(self) -> Row:
        for slabs, copies in self.extent.copies.items():
            try:
                self._add_slabs(slabs, copies)
            except RaggedConfigError as error:
                self.failed.append({"name": slabs.name, "failed": short_error(error)})
        baselines = self._add_baselines()
        times = self.context.timer.compare(self.prepared, self.calls)
        return self._row(times, baselines)

    def _add(self, name: str, call: Call, calls: int) -> None:
        self.prepared[name] = self.context.timer.prepare(call)
        self.calls[name] = calls

    def _add_slabs(self, slabs: Slabs, copies: int) -> None:
        case, model, context = self.case, self.case.model, self.context
        cache = torch.float8_e4m3fn if slabs.fp8 else context.dtype
        check_cache("triton", cache, device_capability(str(context.device)))
        kept = slabs.kept(model, self.extent.layers)
        stage = make_stage(
            kept,
            model.head_dim,
            model.q_per_kv,
            model.segment,
            case.batch * copies,
            case.length,
            context.dtype,
            context.device,
            form=slabs.form,
            cache=cache,
        )
        shape = (model.heads, model.q_per_kv, model.head_dim, slabs.stored)
        if shape not in context.residents:
            context.residents[shape], _ = measured_residents(stage, case.batch)
        layers, queries, keys = len(kept), self.queries, self.keys
        for method in slabs.methods:
            operations = stage.operations(method, context.residents[shape], case.batch)
            batches = stage.decode_batches(operations, case.batch, copies, case.length)

            def ours(operations=operations, batches=batches) -> None:
                for batch in batches:
                    for layer in range(layers):
                        operations.decode(layer, queries, keys, keys, batch)

            name = f"ours {slabs.name} {method}"
            self._add(name, ours, copies * layers)
            ctas = {"ctas_per_layer": [len(layer.ctas) for layer in batches[0].work]}
            self.ours.append({**self._described(name, slabs, stage), "method": method, **ctas})
        if context.flashinfer is not None and slabs.plain and slabs.ratio < 1:
            name = f"flashinfer on slabs {slabs.name}"
            if copies > MOST_PLANNED:
                self.failed.append({"name": name, "failed": f"{copies} copies would take too long to plan"})
                return
            try:
                self._add_flashinfer(name, stage, slabs, copies)
            except Exception as error:
                self.failed.append({"name": name, "failed": short_error(error)})

    def _described(self, name: str, slabs: Slabs, stage: Stage) -> Row:
        """What a variant keeps and reads."""
        model, kept = self.case.model, stage.store.layout.kept
        work = mean_work([decode_work(self.case, row, slabs) for row in kept])
        return {
            "name": name,
            "ratio": slabs.ratio,
            "stored": slabs.stored,
            "token_share": float(kept.mean()) / model.segment,
            "resident_ctas": self.context.residents[model.heads, model.q_per_kv, model.head_dim, slabs.stored],
            "bytes": work.bytes,
            "bytes_over_full": work.bytes / full_decode_work(self.case).bytes,
        }

    def _add_flashinfer(self, name: str, stage: Stage, slabs: Slabs, copies: int) -> None:
        case, layers = self.case, stage.store.layout.num_layers
        decoders = flashinfer_calls.slab_decode(stage, self.queries, self.keys, copies, case.length)
        operations = stage.operations("exact", FALLBACK_RESIDENT, case.batch)
        batch = stage.decode_batches(operations, case.batch, 1, case.length)[0]
        difference = distance(decoders[0](0), operations.decode(0, self.queries, self.keys, self.keys, batch))

        def theirs() -> None:
            for decoder in decoders:
                for layer in range(layers):
                    decoder(layer)

        self._add(name, theirs, len(decoders) * layers)
        described = self._described(name, slabs, stage)
        self.ours.append({**described, "method": "flashinfer", "difference": difference})

    def _add_baselines(self) -> list[Row]:
        case, model, calls = self.case, self.case.model, self.extent.full_calls
        cache = FullCache(self.context, calls, case.batch, case.length, model.heads, model.head_dim)
        found = decode_baselines(cache, self.queries)
        if self.context.flashinfer is not None:
            try:
                found["flashinfer"] = flashinfer_calls.full_decode(self.context.flashinfer, cache, self.queries)
            except Exception as error:
                self.failed.append({"name": "flashinfer", "failed": short_error(error)})
        runs, rows = working(found, self.context, tolerance=2e-2)
        for name, attend in runs.items():

            def theirs(attend: Attend = attend) -> None:
                for call in range(calls):
                    attend(call)

            self._add(name, theirs, calls)
        return rows

    def _row(self, times: dict[str, Times], baselines: list[Row]) -> Row:
        case = self.case
        full = full_decode_work(case)
        for baseline in baselines:
            if baseline["baseline"] in times:
                baseline |= self._speed(times[baseline["baseline"]], full.bytes)
        fastest = min((b for b in baselines if "median_us" in b), key=lambda b: b["median_us"], default=None)
        for entry in self.ours:
            entry |= self._speed(times[entry["name"]], entry["bytes"])
            if fastest is not None:
                entry["speedup"] = fastest["median_us"] / entry["median_us"]
                entry["speedup_over_ideal"] = entry["speedup"] * entry["bytes_over_full"]
        return {
            "case": case.name,
            "length": case.length,
            "layers": self.extent.layers,
            "copies": {slabs.name: copies for slabs, copies in self.extent.copies.items()},
            "full_bytes": full.bytes,
            "best_baseline": fastest and fastest["baseline"],
            "ours": self.ours,
            "baselines": baselines,
            "failed": self.failed,
        }

    def _speed(self, times: Times, moved: int) -> Row:
        rate = moved / (times.median * 1e-6)
        return {
            **times.summary(),
            "gb_per_s": rate / 1e9,
            "percent_of_copy": self.context.percent_of_copy(rate),
        }


def show_row(row: Row) -> None:
    keys = ("name", "median_us", "megabytes", "gb_per_s", "percent_of_copy", "speedup", "speedup_over_ideal")
    lines = [[{**e, "megabytes": e["bytes"] / 1e6}.get(key) for key in keys] for e in row["ours"]]
    for baseline in row["baselines"]:
        if "median_us" in baseline:
            name = "full KV: " + baseline["baseline"]
            figures = [
                baseline["median_us"],
                row["full_bytes"] / 1e6,
                baseline["gb_per_s"],
                baseline["percent_of_copy"],
            ]
            lines.append([name, *figures, None, None])
        else:
            lines.append([f"full KV: {baseline['baseline']}: {baseline['failed'][:60]}", *[None] * 6])
    columns = ("variant", "us a layer", "MB", "GB/s", "% of copy", "speed-up", "over 1/share")
    show(f"decode: {row['case']}; best baseline: {row['best_baseline']}", columns, lines)

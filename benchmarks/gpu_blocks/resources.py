"""Block `occupancy`: registers, shared memory and spills of the compiled kernels, and how many CTAs the GPU holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.gpu_blocks.cases import MODELS, PREFILL_RATIO, ExtendCase, Model, kept_counts
from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.extend import Chunks
from benchmarks.gpu_blocks.stage import make_stage, measured_residents
from benchmarks.gpu_blocks.tables import show
from sgl_ragged.attention.occupancy import Resources, ctas_per_sm, device_limits
from sgl_ragged.mem_pool.slab_format import WIDE


def run(context: Context, models: tuple[Model, ...] = MODELS) -> Iterator[Row]:
    rows: list[Row] = []
    shapes = {(model.heads, model.q_per_kv, model.head_dim): model for model in models}
    for shape, model in shapes.items():
        kept = kept_counts(model, PREFILL_RATIO, 1)
        tokens = 2 * model.segment
        stage = make_stage(
            kept, model.head_dim, model.q_per_kv, model.segment, 1, tokens, context.dtype, context.device
        )
        context.residents[*shape, WIDE.name], kernel = measured_residents(stage, 1)
        rows.append(_row(context, f"decode, {model.name}", kernel))
        chunks = Chunks(context, ExtendCase(model, model.segment, model.segment), PREFILL_RATIO)
        output = torch.empty_like(chunks.queries)
        keys = chunks.queries[:, :, 0].contiguous()
        kernel = chunks.operations.attend_chunks(0, chunks.queries, keys, keys, chunks.batch, output)
        rows.append(_row(context, f"extend, {model.name}", kernel))
    columns = ("kernel", "registers", "shared bytes", "warps", "spills", "CTAs/SM", "resident")
    keys = ("case", "registers", "shared_bytes", "warps", "spills", "ctas_per_sm", "resident_ctas")
    lines = [[row.get(key) for key in keys] for row in rows]
    show("occupancy", columns, lines)
    yield from rows


def _row(context: Context, name: str, kernel: object) -> Row:
    if kernel is None:
        return {"case": name, "failed": "no compiled kernel in the interpreter"}
    used, properties = Resources.of(kernel), torch.cuda.get_device_properties(context.device)
    each = ctas_per_sm(used.registers, used.warps, used.shared_bytes, device_limits(properties))
    resident = each * properties.multi_processor_count
    return {"case": name, **asdict(used), "ctas_per_sm": each, "resident_ctas": resident}

"""Block `overhead`: the host's time for describing batches and for launching one layer, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_blocks.cases import OVERHEAD_CASE, PREFILL_RATIO, OverheadCase, kept_counts
from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.stage import FALLBACK_RESIDENT, make_stage
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call, host_us


def run(context: Context, case: OverheadCase = OVERHEAD_CASE, repeats: int = 50) -> Iterator[Row]:
    rows: list[Row] = []
    for batch in case.batches:
        for name, call in _calls(context, case, batch).items():
            rows.append({"case": f"{name}, batch {batch}", **host_us(call, repeats).summary()})
        context.release()
    show("overhead on the host", ("case", "us", "min"), [[r["case"], r["median_us"], r["min_us"]] for r in rows])
    yield from rows


def _calls(context: Context, case: OverheadCase, batch: int) -> dict[str, Call]:
    model, device = case.model, context.device
    stage = make_stage(
        kept_counts(model, PREFILL_RATIO, 1),
        model.head_dim,
        model.q_per_kv,
        model.segment,
        batch,
        case.context,
        context.dtype,
        device,
    )
    operations = stage.operations("exact", FALLBACK_RESIDENT, batch)
    requests = torch.arange(1, batch + 1, device=device)
    lengths = torch.full((batch,), case.context - 1, device=device)
    on_host = lengths.cpu()
    shape = (batch, model.heads, model.q_per_kv, model.head_dim)
    queries = torch.randn(shape, device=device).to(context.dtype)
    keys = queries[:, :, 0].contiguous()
    described = operations.describe_decode(stage.table, requests, lengths, on_host)
    # The chunk of the batch is as long whatever the number of requests.
    each = max(case.chunk // batch, 1)
    prefixes, chunks = [case.context - each] * batch, [each] * batch
    return {
        "describe_decode": lambda: operations.describe_decode(stage.table, requests, lengths, on_host),
        f"describe_extend, {each} tokens each": lambda: operations.describe_extend(
            stage.table, requests, prefixes, chunks
        ),
        "launches of decode, one layer, no graph": lambda: operations.decode(0, queries, keys, keys, described),
    }

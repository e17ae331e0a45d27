"""Block `append`: copying keys and values of new tokens to the tails, one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_blocks.arithmetic import append_work
from benchmarks.gpu_blocks.cases import APPEND_CASE, AppendCase
from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call
from sgl_ragged.attention.kernels import append

LAYERS = 4


def run(context: Context, case: AppendCase = APPEND_CASE) -> Iterator[Row]:
    model, device = case.model, context.device
    rows_needed = max(case.batches) + 1
    tails = torch.zeros(
        (rows_needed, LAYERS, 2, model.heads, model.segment, model.head_dim), dtype=context.dtype, device=device
    )
    variants: dict[str, Call] = {}
    tokens: dict[str, int] = {}

    def add(name: str, count: int, requests: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        keys, values = torch.randn((2, count, model.heads, model.head_dim), device=device).to(context.dtype)
        numbers = torch.arange(count, dtype=torch.int32, device=device)

        def call() -> None:
            for layer in range(LAYERS):
                append.append(tails, layer, keys, values, numbers, requests, places, rows)

        variants[name], tokens[name] = call, count

    for batch in case.batches:
        numbers = torch.arange(batch, dtype=torch.int32, device=device)
        add(f"{batch} requests, a token each", batch, numbers, numbers * 7 % model.segment, numbers.long() + 1)
    places = torch.arange(case.remainder, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    add(f"remainder of {case.remainder} tokens", case.remainder, torch.zeros_like(places), places, one)
    prepared = {name: context.timer.prepare(call) for name, call in variants.items()}
    times = context.timer.compare(prepared, dict.fromkeys(prepared, LAYERS))
    rows: list[Row] = []
    for name, taken in times.items():
        moved = append_work(model, tokens[name]).bytes
        rows.append({"case": name, **taken.summary(), "bytes": moved, "gb_per_s": moved / taken.median / 1e3})
    show("append, one layer", ("case", "us", "GB/s"), [[r["case"], r["median_us"], r["gb_per_s"]] for r in rows])
    yield from rows

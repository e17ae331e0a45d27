"""Block `append`: copying keys and values of new tokens to the tails, one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_blocks.arithmetic import append_work
from benchmarks.gpu_blocks.cases import APPEND_CASE, PREFILL_RATIO, AppendCase
from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import Call
from sgl_ragged.attention.kernels import append

LAYERS = 4


def run(context: Context, case: AppendCase = APPEND_CASE) -> Iterator[Row]:
    model, device = case.model, context.device
    # As many tokens a page as a slab of this ratio has room for.
    each = int(model.segment * PREFILL_RATIO)
    most, requests_needed = -(-model.segment // each), max(case.batches)
    shape = (requests_needed * most, LAYERS, 2, model.heads, each, model.head_dim)
    tails = torch.zeros(shape, dtype=context.dtype, device=device)
    scattered = torch.randperm(requests_needed * most, device=device)
    pages = scattered.view(requests_needed, most).to(torch.int32)
    variants: dict[str, Call] = {}
    tokens: dict[str, int] = {}

    def add(name: str, count: int, requests: torch.Tensor, places: torch.Tensor) -> None:
        keys, values = torch.randn((2, count, model.heads, model.head_dim), device=device).to(context.dtype)
        numbers = torch.arange(count, dtype=torch.int32, device=device)

        def call() -> None:
            for layer in range(LAYERS):
                append.append(tails, layer, keys, values, numbers, requests, places, pages)

        variants[name], tokens[name] = call, count

    for batch in case.batches:
        numbers = torch.arange(batch, dtype=torch.int32, device=device)
        add(f"{batch} requests, a token each", batch, numbers, numbers * 7 % model.segment)
    places = torch.arange(case.remainder, dtype=torch.int32, device=device)
    add(f"remainder of {case.remainder} tokens", case.remainder, torch.zeros_like(places), places)
    prepared = {name: context.timer.prepare(call) for name, call in variants.items()}
    times = context.timer.compare(prepared, dict.fromkeys(prepared, LAYERS))
    rows: list[Row] = []
    for name, taken in times.items():
        moved = append_work(model, tokens[name]).bytes
        rate = moved / taken.median * 1e6
        speed = {"gb_per_s": rate / 1e9, "percent_of_copy": context.percent_of_copy(rate)}
        rows.append({"case": name, **taken.summary(), "bytes": moved, **speed})
    shown = ("case", "median_us", "gb_per_s", "percent_of_copy")
    show("append, one layer", ("case", "us", "GB/s", "% of copy"), [[row.get(key) for key in shown] for row in rows])
    yield from rows

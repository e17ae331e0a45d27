"""Block `bandwidth`: what this GPU's memory and matrix units do at best, which percentages are of."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_blocks.context import Context, Row
from benchmarks.gpu_blocks.tables import show

COPIED = 4 << 30
SIDE = 8192


def run(context: Context, copied: int = COPIED, side: int = SIDE) -> Iterator[Row]:
    source = torch.empty(copied // 4, dtype=torch.float32, device=context.device).normal_()
    target = torch.empty_like(source)
    left, right = torch.randn((2, side, side), device=context.device).to(context.dtype)
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(left, right)}
    times = context.timer.compare({name: context.timer.prepare(call) for name, call in calls.items()})
    copy = 2 * source.nbytes / times["copy"].median * 1e6
    matmul = 2 * side**3 / times["matmul"].median * 1e6
    context.ceilings |= {"copy_bytes_per_s": copy, "matmul_flop_per_s": matmul}
    rows = [
        {"case": f"device-to-device copy of {copied >> 20} MiB", **times["copy"].summary(), "bytes_per_s": copy},
        {"case": f"{side}^3 matrix product, {context.dtype}", **times["matmul"].summary(), "flop_per_s": matmul},
    ]
    lines = [[rows[0]["case"], copy / 1e12, "TB/s, read + written"], [rows[1]["case"], matmul / 1e12, "TFLOP/s"]]
    show("ceilings", ("measured", "rate", "unit"), lines)
    yield from rows

"""Decode speed of the ragged pool against SGLang's token pool with torch_native, on this machine's CPU.

    python -m benchmarks.decode_speed [--json] [--batch 8] [--context 2000] [--ratio 0.3] [--rounds 4]

Both servers are up at once and take turns (A B A B); prompts are cached, so what is timed is decoding: the
time of `steps` tokens after the first, for a whole batch. Only the ratio of the two means anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.demo import MODEL
from benchmarks.launch import Server, serve


def batch_seconds(server: Server, prompts: list[list[int]], new: int) -> float:
    """Wall seconds until all prompts, sent at once, have `new` tokens each."""

    def send(prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()

    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(send, prompts))
    return time.perf_counter() - started


def step_ms(server: Server, prompts: list[list[int]], steps: int) -> float:
    """Milliseconds of one decode step of the batch: a run with 1 + steps tokens less a run with 1."""
    short = batch_seconds(server, prompts, 1)
    return 1000 * (batch_seconds(server, prompts, 1 + steps) - short) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 300, options.context).tolist() for _ in range(options.batch)]
    common = ["--dtype", "float32", "--max-total-tokens", str(2 * options.batch * (options.context + 512))]
    common += ["--max-running-requests", str(options.batch), "--sleep-on-idle"]
    ragged_args = ["--kv-pool", "ragged", "--ragged-ratio", str(options.ratio)]
    console = Console(stderr=options.json)
    times: dict[str, list[float]] = {"token": [], "ragged": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(MODEL, *common, "--attention-backend", "torch_native", log=Path(folder) / "token.log") as token,
        serve(MODEL, *common, *ragged_args, log=Path(folder) / "ragged.log") as ragged,
    ):
        servers = {"token": token, "ragged": ragged}
        for server in servers.values():
            step_ms(server, prompts, 4)
        for _ in track(range(options.rounds), description="rounds", console=console):
            for name, server in servers.items():
                times[name].append(step_ms(server, prompts, options.steps))
    ratios = [a / b for a, b in zip(times["ragged"], times["token"], strict=True)]
    result = {"options": vars(options), "step_ms": times, "ragged_over_token": statistics.median(ratios)}
    if options.json:
        print(json.dumps(result, indent=2))
        return
    table = Table(title=f"one decode step, batch {options.batch}, {options.context} tokens of context, ms")
    for column in ("pool", "median", "all rounds"):
        table.add_column(column, justify="right")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.1f}", " ".join(f"{value:.1f}" for value in values))
    console.print(table)
    console.print(f"ragged / token, median over rounds: {result['ragged_over_token']:.2f} (below 1: ragged is faster)")


if __name__ == "__main__":
    main()

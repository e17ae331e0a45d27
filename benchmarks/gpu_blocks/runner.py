"""Runs the blocks in processes of their own, one after the other, within a time.

A kernel that goes astray takes its process's GPU context with it: then that block ends, the others go on. What a block
has found is written after every case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_blocks import (
    append,
    beside,
    ceilings,
    decode,
    extend,
    flashinfer_calls,
    machine,
    overhead,
    resources,
    seal,
)
from benchmarks.gpu_blocks.cases import CORRECTNESS_CASES, CorrectnessCase
from benchmarks.gpu_blocks.context import Context, Row, short_error
from benchmarks.gpu_blocks.correctness import run_case
from benchmarks.gpu_blocks.record import MEASURED, Record
from benchmarks.gpu_blocks.tables import show
from benchmarks.gpu_blocks.timing import DeviceTimer
from sgl_ragged.errors import RaggedConfigError

Block = Callable[[Context], Iterator[Row]]
BLOCKS: dict[str, Block] = {
    "bandwidth": ceilings.run,
    "occupancy": resources.run,
    "decode": decode.run,
    "formats": decode.run_formats,
    "extend": extend.run,
    "seal": seal.run,
    "append": append.run,
    "beside": beside.run,
    "overhead": overhead.run,
}

GROUPS = (
    ("bandwidth", "occupancy"),
    ("correctness",),
    ("decode",),
    ("formats",),
    ("extend",),
    ("seal", "append", "beside", "overhead"),
)
"""Blocks that share a process, in the order in which they run."""

KEPT_BACK = {"correctness": 150.0, "decode": 140.0, "formats": 100.0, "extend": 45.0}
"""Seconds that a group leaves for those after it when it uses all of its time."""

MINIMUM = {"correctness": 40.0, "decode": 40.0, "formats": 25.0, "extend": 25.0, "seal": 20.0}
LEAST = 10.0
"""Seconds that must be left for a group to begin, by its first block; LEAST for groups that are not listed."""

GRACE = 40.0
"""Seconds for a process to finish its current case when its time is up."""

CASE_SECONDS = 150.0
PARALLEL_CASES = 6


def run(options: argparse.Namespace, script: Path) -> int:
    """Exit status: 0 if every check passed and every block ran."""
    if options.correctness_case is not None:
        return _run_correctness_case(options.correctness_case)
    if options.child:
        return _run_blocks(options.blocks, Record(options.output), time.monotonic() + options.seconds)
    if not torch.cuda.is_available():
        print("gpu: torch finds no GPU; --dry-run needs none", file=sys.stderr)
        return 2
    return _run_groups(options, script)


def _run_groups(options: argparse.Namespace, script: Path) -> int:
    deadline = time.monotonic() + options.seconds
    record = Record(options.output)
    record.start(MEASURED, blocks=options.blocks, seconds=options.seconds)
    for group in GROUPS:
        blocks = [block for block in group if block in options.blocks]
        if not blocks:
            continue
        left = deadline - time.monotonic()
        allowed = left - (KEPT_BACK.get(blocks[0], 0.0) if _later(blocks[0], options.blocks) else 0.0)
        if left < MINIMUM.get(blocks[0], LEAST):
            for block in blocks:
                record.set_block(block, {"status": "skipped", "reason": f"{left:.0f} s were left"})
            continue
        allowed = max(allowed, MINIMUM.get(blocks[0], LEAST))
        if blocks == ["correctness"]:
            _run_correctness(script, record, allowed, left)
        else:
            _run_child(script, blocks, record, options.output, allowed, left)
    return _report(record, options.blocks, time.monotonic() - deadline + options.seconds)


def _later(block: str, chosen: list[str]) -> bool:
    """Whether blocks after this one's group are to run."""
    place = next(i for i, group in enumerate(GROUPS) if block in group)
    return any(other in chosen for group in GROUPS[place + 1 :] for other in group)


def _run_child(script: Path, blocks: list[str], record: Record, output: Path, seconds: float, left: float) -> None:
    """seconds: after which it begins no case. left: after which it is ended, whatever it compiles."""
    command = [sys.executable, str(script), "--child", "--output", str(output), "--blocks", ",".join(blocks)]
    started = time.monotonic()
    try:
        # The child stops by itself between cases.
        status = subprocess.run([*command, "--seconds", str(seconds)], timeout=min(seconds + GRACE, left)).returncode
        reason = f"its process ended with status {status}"
    except subprocess.TimeoutExpired:
        reason = "its process did not end in time"
    found = record.read()["blocks"]
    for block in blocks:
        if found.get(block, {}).get("status") not in ("done", "failed"):
            broken = {**found.get(block, {}), "status": "failed", "reason": reason}
            record.set_block(block, {**broken, "seconds": round(time.monotonic() - started, 1)})


def _run_blocks(blocks: list[str], record: Record, deadline: float) -> int:
    """In the child: some blocks with one context."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    # Captures and cases collect garbage; what is imported need not be looked through each time.
    gc.freeze()
    document = record.read()
    if not document["machine"]:
        record.set_machine(machine.describe(device))
    free, _ = torch.cuda.mem_get_info()
    context = Context(
        device,
        DeviceTimer(),
        memory=int(free * 0.93),
        deadline=deadline,
        flashinfer=flashinfer_calls.load(),
        ceilings=_ceilings(document),
    )
    status = 0
    for name in blocks:
        rows: list[Row] = []
        context.skipped = []
        started = time.monotonic()

        def save(status: str, name: str = name, rows: list[Row] = rows, started: float = started, **more: Any) -> None:
            seconds = round(time.monotonic() - started, 1)
            block = {"status": status, "seconds": seconds, "rows": rows, "skipped": context.skipped, **more}
            record.set_block(name, block)

        try:
            for row in BLOCKS[name](context):
                rows.append(row)
                save("running")
            save("done", **({"ceilings": context.ceilings} if name == "bandwidth" else {}))
        except Exception as error:
            traceback.print_exc()
            save("failed", reason=short_error(error))
            status = 1
        context.release()
    return status


def _ceilings(document: dict[str, Any]) -> dict[str, float]:
    return dict(document["blocks"].get("bandwidth", {}).get("ceilings", {}))


def _run_correctness_case(name: str) -> int:
    """In a child of its own: prints the case's rows, or why it cannot run here, as the last line."""
    case = next(case for case in CORRECTNESS_CASES if case.name == name)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        found: list[Row] | str = run_case(case, device, DeviceTimer())
    except RaggedConfigError as error:
        found = str(error)
    print(json.dumps(found), flush=True)
    return 0


def _run_correctness(script: Path, record: Record, seconds: float, most: float) -> None:
    """Every case in a process of its own, several at once: compiling takes most of the time, and nothing is timed.

    seconds, most: as `seconds` and `left` of `_run_child`.
    """
    started = time.monotonic()
    rows: list[Row] = []
    skipped: list[dict[str, str]] = []

    def one(case: CorrectnessCase) -> list[Row] | str:
        taken = time.monotonic() - started
        left = seconds - taken
        if left < 15:
            return "no time left"
        command = [sys.executable, str(script), "--correctness-case", case.name]
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=min(left + 20, most - taken, CASE_SECONDS)
            )
            if finished.returncode == 0:
                return json.loads(finished.stdout.strip().splitlines()[-1])
            lines = (finished.stderr.strip() or "no message").splitlines()
            print("\n".join(lines[-25:]), file=sys.stderr, flush=True)
            reason = f"status {finished.returncode}: {lines[-1]}"
        except subprocess.TimeoutExpired:
            reason = "did not end in time"
        return [{"case": case.name, "check": "run", "passed": False, "reason": reason[:300]}]

    def save(status: str) -> None:
        seconds_taken = round(time.monotonic() - started, 1)
        block = {"status": status, "seconds": seconds_taken, "rows": rows, "skipped": skipped}
        record.set_block("correctness", {**block, "cases": [asdict(case) for case in CORRECTNESS_CASES]})

    workers = max(1, min(PARALLEL_CASES, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(workers) as threads:
        for case, found in zip(CORRECTNESS_CASES, threads.map(one, CORRECTNESS_CASES), strict=True):
            if isinstance(found, str):
                skipped.append({"case": case.name, "reason": found})
            else:
                rows += found
            save("running")
    save("done")
    lines = [
        [r["case"], r["check"], "ok" if r["passed"] else "FAILED", r.get("relative"), r.get("largest"), r.get("bound")]
        for r in rows
    ]
    show("correctness", ("case", "check", "", "relative error", "largest", "bound"), lines)


def _report(record: Record, chosen: list[str], seconds: float) -> int:
    blocks = record.read()["blocks"]
    wrong = [row for row in blocks.get("correctness", {}).get("rows", []) if not row["passed"]]
    lines = []
    for name in chosen:
        block = blocks.get(name, {"status": "missing"})
        note = block.get("reason", f"{len(block['skipped'])} cases skipped" if block.get("skipped") else "")
        lines.append([name, block["status"], block.get("seconds"), note])
    show("blocks", ("block", "status", "seconds", "note"), lines)
    print(f"\n{len(wrong)} checks failed; {seconds:.0f} s; {record.path}", flush=True)
    failed = any(blocks.get(name, {}).get("status") not in ("done", "skipped") for name in chosen)
    return int(bool(wrong) or failed)

"""Every case of the measurement worked out on paper: bytes, arithmetic, CTA maps and the least possible time."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu_blocks import cases
from benchmarks.gpu_blocks.arithmetic import (
    COPY_BANDWIDTH,
    TENSOR_RATE,
    Work,
    append_work,
    decode_work,
    extend_work,
    fit_decode,
    full_decode_work,
    mean_work,
    seal_work,
)
from benchmarks.gpu_blocks.record import COMPUTED
from benchmarks.gpu_blocks.tables import show
from sgl_ragged.attention.cta_map import METHODS, build_cta_map, imbalance

SMS, CTAS_PER_SM = 132, 3
MEMORY = 127 << 30
"""Bytes of an H200 that the cases may take: 139 GiB less what torch, graphs and libraries need."""

ASSUMED = {
    "kind": COMPUTED,
    "gpu": "H200",
    "copy_bandwidth_bytes_per_s": COPY_BANDWIDTH,
    "bf16_flop_per_s_data_sheet": TENSOR_RATE,
    "resident_ctas": SMS * CTAS_PER_SM,
    "memory_bytes": MEMORY,
}


def kept_summary(kept: np.ndarray, segment: int) -> dict[str, Any]:
    return {
        "kept": kept.tolist(),
        "min": int(kept.min()),
        "median": float(np.median(kept)),
        "max": int(kept.max()),
        "mean_share": round(float(kept.mean()) / segment, 4),
    }


def _work(work: Work) -> dict[str, Any]:
    return {
        "bytes_per_layer": work.bytes,
        "flop_per_layer": work.flop,
        "memory_floor_us": round(work.memory_floor_us(), 2),
        "floor_us": round(work.floor_us(), 2),
    }


def decode_rows() -> list[dict[str, Any]]:
    return [_decode_row(case, cases.WIDE_SLABS) for case in cases.DECODE_CASES]


def format_rows() -> list[dict[str, Any]]:
    return [_decode_row(case, cases.NARROW_SLABS) for case in cases.FORMAT_CASES]


def _decode_row(case: cases.DecodeCase, variants: tuple[cases.Slabs, ...]) -> dict[str, Any]:
    model = case.model
    row: dict[str, Any] = {
        "case": case.name,
        "queries": [case.batch, model.heads, model.q_per_kv, model.head_dim],
        "length": case.length,
        "sealed_segments": case.sealed,
        "tail_tokens": case.tail,
        "segment": model.segment,
        "full": _work(full_decode_work(case)),
        "ratios": {},
    }
    extent = fit_decode(case, variants, MEMORY)
    if isinstance(extent, str):
        row["does_not_fit"] = extent
    else:
        row["extent"] = {
            "layers": extent.layers,
            "copies": {slabs.name: n for slabs, n in extent.copies.items()},
            "full_calls": extent.full_calls,
            "gb": round(extent.bytes / 1e9, 2),
        }
    for slabs in variants:
        kept = slabs.kept(model)
        work = mean_work([decode_work(case, kept_row, slabs) for kept_row in kept])
        by_method = {}
        for method in METHODS:
            counts = build_cta_map(kept, SMS * CTAS_PER_SM, [case.batch], method).for_batch(case.batch)
            by_method[method] = {
                "ctas_per_layer": counts.sum(axis=1).tolist(),
                "largest_over_mean": imbalance(kept, counts).round(3).tolist(),
            }
        row["ratios"][slabs.name] = {
            **kept_summary(kept, model.segment),
            **_work(work),
            "bytes_over_full": round(work.bytes / row["full"]["bytes_per_layer"], 4),
            "cta_map": by_method,
        }
    return row


def extend_rows() -> list[dict[str, Any]]:
    rows = []
    for case in cases.EXTEND_CASES:
        model = case.model
        ratios = {}
        for ratio in cases.RATIOS:
            kept = cases.kept_counts(model, ratio)
            work = mean_work([extend_work(case, kept_row) for kept_row in kept])
            ratios[f"{ratio:g}"] = {**kept_summary(kept, model.segment), **_work(work)}
        rows.append(
            {
                "case": case.name,
                "queries": [case.tokens, model.heads, model.q_per_kv, model.head_dim],
                "full": _work(extend_work(case, None)),
                "ratios": ratios,
            }
        )
    return rows


def seal_rows() -> list[dict[str, Any]]:
    case = cases.SEAL_CASE
    layer = cases.kept_counts(case.model, cases.PREFILL_RATIO)
    rows = [
        {"case": f"{scorer}, {case.segments} segments of a chunk, one layer", **_work(work)}
        for scorer in case.scorers
        for work in [mean_work([seal_work(case.model, case.segments, row[None], scorer) for row in layer])]
    ]
    every = cases.kept_counts(case.model, cases.PREFILL_RATIO, all_layers=True)
    return rows + [
        {
            "case": f"{n} pending, {len(every)} layers",
            **_work(seal_work(case.model, n, every, case.scorers[0], staged=True)),
        }
        for n in case.pending
    ]


def append_rows() -> list[dict[str, Any]]:
    case = cases.APPEND_CASE
    counts = [(f"{n} requests", n) for n in case.batches] + [(f"remainder of {case.remainder}", case.remainder)]
    return [{"case": name, **_work(append_work(case.model, tokens))} for name, tokens in counts]


def correctness_rows() -> list[dict[str, Any]]:
    return [
        {
            "case": case.name,
            "lengths": list(case.lengths),
            "segment": case.segment,
            **kept_summary(np.array(case.kept), case.segment),
        }
        for case in cases.CORRECTNESS_CASES
    ]


BLOCKS = {
    "correctness": correctness_rows,
    "decode": decode_rows,
    "formats": format_rows,
    "extend": extend_rows,
    "seal": seal_rows,
    "append": append_rows,
}


def _decode_lines(row: dict[str, Any]) -> list[list[Any]]:
    lines = []
    for ratio, entry in row["ratios"].items():
        maps = [entry["cta_map"][method] for method in METHODS]
        ctas = "/".join(str(max(one["ctas_per_layer"])) for one in maps)
        loads = "/".join(f"{max(one['largest_over_mean']):.2f}" for one in maps)
        lines.append([row["case"], ratio, f"{entry['min']}..{entry['max']}", *_figures(entry), ctas, loads])
    held = (
        row["does_not_fit"] if "does_not_fit" in row else f"{row['extent']['layers']} layers, {row['extent']['gb']} GB"
    )
    return [*lines, [row["case"], "full", None, *_figures(row["full"]), None, held]]


def _figures(entry: dict[str, Any]) -> list[float]:
    return [entry["bytes_per_layer"] / 1e6, entry["flop_per_layer"] / 1e9, entry["memory_floor_us"]]


def show_block(name: str, rows: list[dict[str, Any]]) -> None:
    label = f"{name}: {COMPUTED}"
    if name in ("decode", "formats"):
        columns = ("case", "ratio", "n", "MB a layer", "GFLOP", "memory floor us", "CTAs", "largest / mean")
        lines = [line for row in rows for line in _decode_lines(row)]
        show(f"{label}; CTAs and largest / mean load of {', '.join(METHODS)}", columns, lines)
    elif name == "extend":
        columns = ("case", "ratio", "MB a layer", "GFLOP", "memory floor us", "floor us")
        lines = [
            [row["case"], ratio, *_figures(entry), entry["floor_us"]]
            for row in rows
            for ratio, entry in [*row["ratios"].items(), ("full", row["full"])]
        ]
        show(label, columns, lines)
    elif name == "correctness":
        show(label, ("case", "S", "n"), [(r["case"], r["segment"], f"{r['min']}..{r['max']}") for r in rows])
    else:
        lines = [(r["case"], r["bytes_per_layer"] / 1e6, r["memory_floor_us"]) for r in rows]
        show(label, ("case", "MB", "memory floor us"), lines)

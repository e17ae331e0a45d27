"""The blocks of benchmarks/gpu.py in the interpreter, on tiny shapes: that they run, not what they measure."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu_blocks import append, beside, ceilings, correctness, decode, extend, overhead, resources, seal
from benchmarks.gpu_blocks.cases import (
    LLAMA_8B,
    AppendCase,
    BesideCase,
    CorrectnessCase,
    DecodeCase,
    ExtendCase,
    OverheadCase,
    SealCase,
    Slabs,
)
from benchmarks.gpu_blocks.context import Context
from benchmarks.gpu_blocks.timing import HostTimer
from sgl_ragged.attention import flashinfer_ops
from sgl_ragged.mem_pool.slab_format import FORMATS, INT8
from tests.kernels.paged_decode import PagedDecode

CPU = torch.device("cpu")
TINY = CorrectnessCase("float32", 2, 16, "keydiff", "exact", 32, ((16, 32), (32, 16)))
MODEL = dataclasses.replace(LLAMA_8B, layers=(2, 20), q_per_kv=2, head_dim=16, segment=64)


@pytest.fixture
def context() -> Context:
    """float16, as the interpreter cannot multiply bfloat16 matrices."""
    return Context(CPU, HostTimer(), memory=1 << 30, dtype=torch.float16, replay_bytes=1)


def finish(rows) -> list[dict]:
    """All rows, as the results file would hold them."""
    return json.loads(json.dumps(list(rows)))


@pytest.fixture(scope="module")
def trial() -> correctness.Trial:
    return correctness.run_trial(TINY, CPU, HostTimer())


def test_correctness_passes_and_names_every_check(trial):
    rows = finish(correctness.check(trial))
    assert [row["check"] for row in rows] == ["seal", "append", "extend", "decode", "replay", "replay equals eager"]
    assert all(row["passed"] for row in rows), rows


@pytest.mark.parametrize(
    "stored",
    [
        {"form": FORMATS["k8v4"], "head_dim": 48},
        pytest.param({"form": INT8}, marks=pytest.mark.thorough),
        pytest.param({"cache": "float8_e4m3fn"}, marks=pytest.mark.thorough),
    ],
    ids=["k8v4", "int8", "fp8"],
)
def test_correctness_of_narrow_slabs_passes_and_can_fail(stored):
    trial = correctness.run_trial(dataclasses.replace(TINY, kept=TINY.kept[:1], **stored), CPU, HostTimer())
    rows = finish(correctness.check(trial))
    assert all(row["passed"] for row in rows), rows
    # One bit of one key.
    trial.stage.store.slabs[int(trial.stage.table[-1, 0]) // TINY.segment].view(torch.uint8)[3] ^= 1
    assert {row["check"] for row in correctness.check(trial) if not row["passed"]} >= {"seal"}


def first_slab(trial: correctness.Trial) -> torch.Tensor:
    """The first kept key of the longest request."""
    return trial.stage.store.slabs[int(trial.stage.table[-1, 0]) // TINY.segment, :16]


def first_open(trial: correctness.Trial) -> torch.Tensor:
    """The first key of the first request, whose segment is open."""
    return trial.stage.store.tails.data[int(trial.stage.table[1, 0]) // TINY.segment, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        (first_slab, {"seal"}),
        (first_open, {"append"}),
        (lambda trial: trial.outputs[0][0][0, 0, 0, 0], {"extend"}),
        (lambda trial: trial.outputs[-1][-1][0, 0, 0, 0], {"decode"}),
        (lambda trial: trial.replayed[0, 0, 0, 0], {"replay", "replay equals eager"}),
    ],
)
@pytest.mark.parametrize("wrong", [torch.nan, 1.0])
def test_correctness_sees_what_is_wrong(trial, where, failing, wrong):
    place = where(trial)
    right = place.clone()
    place[0] += wrong
    rows = correctness.check(trial)
    place.copy_(right)
    # A slab's wrong row leaves the reference with nothing to compare with.
    failed = {row["check"] for row in rows if not row["passed"]}
    assert failed == failing or (failing == {"seal"} and failing <= failed)


@pytest.mark.thorough
def test_decode_reports_every_variant(context):
    rows = finish(decode.run(context, [DecodeCase(MODEL, 256, 2)], variants=(Slabs(0.5), Slabs(1.0))))
    (row,) = rows
    names = [entry["name"] for entry in row["ours"]]
    assert names == ["ours 0.5 exact", "ours 0.5 uniform", "ours 0.5 algorithm1", "ours 0.5 none", "ours 1 exact"]
    assert all(entry["median_us"] > 0 for entry in row["ours"])
    assert row["best_baseline"] is not None
    assert row["ours"][-1]["bytes_over_full"] == 1.0


@pytest.mark.thorough
def test_formats_are_timed_beside_bf16(context):
    narrow = (
        Slabs(0.25),
        Slabs(0.25, FORMATS["k8v4"]),
        Slabs(0.25, FORMATS["k8v4"], of_bytes=True),
        Slabs(0.25, fp8=True),
    )
    (row,) = finish(decode.run(context, [DecodeCase(dataclasses.replace(MODEL, layers=(2,)), 256, 1)], variants=narrow))
    assert row["failed"] == []
    wide, tokens, of_bytes, fp8 = (e for e in row["ours"] if e["method"] == "exact")
    assert [e["name"] for e in (tokens, of_bytes, fp8)] == [
        "ours 0.25 of the tokens in k8v4 exact",
        "ours 0.25 of the bytes in k8v4 exact",
        "ours 0.25 of the tokens in fp8 exact",
    ]
    assert wide["token_share"] == tokens["token_share"] == fp8["token_share"] < of_bytes["token_share"]
    assert tokens["bytes"] < of_bytes["bytes"]
    assert max(tokens["bytes"], fp8["bytes"]) < wide["bytes"]


@pytest.mark.thorough
def test_flashinfer_that_does_not_work_is_a_finding(context):
    context.flashinfer = object()
    model = dataclasses.replace(MODEL, layers=(2,))
    (row,) = finish(decode.run(context, [DecodeCase(model, 128, 1)], variants=(Slabs(0.5),)))
    assert [entry["name"] for entry in row["failed"]] == ["flashinfer on slabs 0.5", "flashinfer"]
    (row,) = finish(extend.run(context, [ExtendCase(model, 64, 64)], ratios=(0.5,)))
    assert [entry["name"] for entry in row["failed"]] == ["flashinfer"]


class Paged:
    """FlashInfer's wrappers for paged caches in NHD layout, decode or causal prefill, as far as they are used."""

    def __init__(self, workspace: torch.Tensor, layout: str, **buffers: object) -> None:
        assert layout == "NHD"

    def plan(self, *arguments, q_data_type, kv_data_type, causal=False) -> None:
        *queries, indptr, indices, last, _, _, _, page = arguments
        self.chunk = int(queries[0][1]) if causal else 1
        self.pages = indices.view(len(last), -1).long()
        self.length = (self.pages.shape[1] - 1) * page + int(last[0])
        assert indptr[-1] == len(indices)

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = (part[self.pages].flatten(1, 2)[:, : self.length].transpose(1, 2) for part in cache)
        own = queries.view(len(self.pages), self.chunk, *queries.shape[1:]).transpose(1, 2)
        mask = torch.ones(self.chunk, self.length, dtype=torch.bool).tril(self.length - self.chunk)
        output = torch.nn.functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask, enable_gqa=True)
        return output.transpose(1, 2).reshape(queries.shape)


@pytest.mark.thorough
def test_flashinfer_is_timed_where_it_works(context, monkeypatch):
    """Against stand-ins for its documented contract: what they are handed is right, as their outputs agree."""
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    context.flashinfer = SimpleNamespace(**dict.fromkeys(names, Paged))
    monkeypatch.setattr(flashinfer_ops, "flashinfer_wrapper", lambda device: PagedDecode)
    model = dataclasses.replace(MODEL, layers=(2,), head_dim=64)
    (row,) = finish(decode.run(context, [DecodeCase(model, 256, 2)], variants=(Slabs(0.5),)))
    assert row["failed"] == []
    assert row["ours"][-1]["name"] == "flashinfer on slabs 0.5"
    assert row["ours"][-1]["difference"] < 1e-2
    assert {b["baseline"]: b for b in row["baselines"]}["flashinfer"]["median_us"] > 0
    (row,) = finish(extend.run(context, [ExtendCase(model, 64, 64, requests=2)], ratios=(0.5,)))
    assert row["failed"] == []
    by_name = {baseline["baseline"]: baseline for baseline in row["baselines"]}
    assert by_name["flashinfer"]["difference"] < 1e-2


def test_occupancy_of_a_compiled_kernel(context, monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernel = SimpleNamespace(n_regs=108, n_spills=0, metadata=SimpleNamespace(shared=71680, num_warps=4))
    row = resources._row(context, "decode", kernel)
    assert (row["ctas_per_sm"], row["resident_ctas"], row["spills"]) == (3, 396, 0)


def test_decode_says_what_does_not_fit(context):
    context.memory = 1000
    assert finish(decode.run(context, [DecodeCase(MODEL, 256, 2)])) == []
    assert "needs" in context.skipped[0]["reason"]


def test_cases_beyond_the_time_are_skipped(context):
    context.deadline = 0.0
    assert finish(decode.run(context, [DecodeCase(MODEL, 256, 2)])) == []
    assert context.skipped == [{"case": "Llama-3.1-8B, 256, batch 2", "reason": "no time left"}]


@pytest.mark.thorough
def test_extend(context):
    (row,) = finish(extend.run(context, [ExtendCase(MODEL, 64, 64, requests=2)], ratios=(0.5,)))
    assert [entry["name"] for entry in row["ours"]] == ["ours 0.5", "ours 0.5, with append and seal"]
    assert all(entry["tflop_per_s"] > 0 for entry in row["ours"])


@pytest.mark.thorough
def test_seal(context):
    model = dataclasses.replace(MODEL, layers=(2,))
    case = SealCase(model, 64, ("keydiff", "key_norm"), pending=(1,))
    rows = finish(seal.run(context, case, prefix=64, hidden=8, feed_forward=8))
    assert len(rows) == 6
    assert rows[-1]["segments"] == 1
    assert rows[0]["percent_of_prefill"] > 0


@pytest.mark.thorough
def test_append(context):
    rows = finish(append.run(context, AppendCase(MODEL, (1, 2))))
    assert [row["case"] for row in rows] == [
        "1 requests, a token each",
        "2 requests, a token each",
        "remainder of 63 tokens",
    ]


@pytest.mark.thorough
def test_what_steps_do_beside_attention(context):
    case = BesideCase(MODEL, (1, 2), 256, 64, hidden=8, features=5, queries=4, overlay=4, slabs=2, programs=(2,))
    rows = finish(beside.run(context, case))
    assert context.skipped == []
    assert all(row["gb_per_s"] > 0 for row in rows)
    named = [row["case"] for row in rows]
    assert len(named) == len(set(named))
    for part in (
        "description of 2",
        "with sinks",
        "behind 192 tokens, with sinks",
        "overlays",
        "a pivot attended to",
        "gate, 64",
        "append with gate",
        "fitted, one layer",
        "fitted, 2 layers",
        "2 programs",
    ):
        assert any(part in name for name in named), part


def test_overhead_ceilings_and_resources(context):
    assert len(finish(overhead.run(context, OverheadCase(MODEL, 128, (1,), 64), repeats=1))) == 3
    assert np.isfinite([row["median_us"] for row in finish(ceilings.run(context, 1 << 16, 16))]).all()
    assert context.ceilings["copy_bytes_per_s"] > 0
    assert all("failed" in row for row in finish(resources.run(context, (MODEL,))))

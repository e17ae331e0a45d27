"""Triton kernels compiled for every promised GPU, without one: nothing spills, loads are wide, loops are pipelined.

What this cannot show is speed, or races.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from _pytest.mark import ParameterSet

from benchmarks.kernel_resources import (
    ARCHITECTURES,
    CODES,
    FP8,
    HEAD_DIMS,
    PADDED_DIMS,
    SEGMENT,
    Build,
    Resources,
    builds,
    compile_build,
    markdown,
)
from sgl_ragged.attention.kernels import append, decode, extend, seal

# Shared memory that one CTA may have, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

DTYPES = ("fp16", "bf16", "fp32")
ATTENTION = (decode.decode_kernel, extend.extend_kernel)


def cells() -> Iterator[ParameterSet]:
    """Architecture, dtype and head dimension; by default nine of them, in which any two of the three meet once."""
    for places in itertools.product(range(3), repeat=3):
        cell = [choices[place] for choices, place in zip((ARCHITECTURES, DTYPES, HEAD_DIMS), places, strict=True)]
        yield pytest.param(*cell, marks=[] if sum(places) % 3 == 0 else pytest.mark.thorough)
    for architecture in ARCHITECTURES:
        yield pytest.param(architecture, "fp32", 0, marks=[] if architecture == 90 else pytest.mark.thorough)
    for architecture, dtype, head_dim in itertools.product(ARCHITECTURES, FP8, HEAD_DIMS):
        by_default = (architecture, dtype, head_dim) in ((80, "fp8e5", 128), (90, "fp8e4nv", 128))
        if architecture >= 89 or dtype == "fp8e5":
            yield pytest.param(architecture, dtype, head_dim, marks=[] if by_default else pytest.mark.thorough)
    for architecture, dtype, head_dim in itertools.product(ARCHITECTURES, CODES, HEAD_DIMS):
        by_default = (architecture, dtype, head_dim) in (
            (80, "int8", 256),
            (90, "k8v4", 128),
            (90, "k6v4", 96),
            (100, "k4v4", 64),
        )
        yield pytest.param(architecture, dtype, head_dim, marks=[] if by_default else pytest.mark.thorough)
    for architecture, dtype, head_dim in itertools.product(ARCHITECTURES, ("bf16", "fp32", *FP8, *CODES), PADDED_DIMS):
        by_default = (architecture, dtype, head_dim) in ((80, "k8v4", 80), (90, "bf16", 96))
        if architecture >= 89 or dtype != "fp8e4nv":
            yield pytest.param(architecture, dtype, head_dim, marks=[] if by_default else pytest.mark.thorough)


@pytest.fixture(autouse=True)
def sglang_without_a_gpu(monkeypatch):
    """SGLang replaces this function where it finds no GPU; kernels must not call it."""
    monkeypatch.setattr(triton, "next_power_of_2", lambda n: 1 << (n - 1).bit_length())


@pytest.mark.parametrize(("architecture", "dtype", "head_dim"), cells())
def test_kernels_compile_without_spills_and_pipelined(architecture, dtype, head_dim):
    for build in builds(architecture):
        if (build.dtype, build.head_dim) != (dtype, head_dim):
            continue
        # Kernels that only move rows are compiled in every variant for one architecture, and in one for the others.
        one_variant = (dtype, head_dim) in (("bf16", 128), ("fp32", 0), ("fp8e5", 128))
        if architecture != 90 and build.kernel not in ATTENTION and not one_variant:
            continue
        found = compile_build(build, architecture)
        assert found.spilled_bytes == 0, found
        assert found.shared_bytes <= SHARED_LIMIT[architecture], found
        if build.kernel in ATTENTION:
            # A row of FP8 or codes takes half the loads or fewer, beside as many loads of slots. Some of decode's load
            # the new token, once.
            assert found.wide_loads >= found.narrow_loads // (8 if dtype in FP8 or dtype in CODES else 1), found
            assert found.async_depth >= 2 or build.constants["STAGES"] == 2, found
            # The fp32 tile of 256 dimensions computes in plain float32.
            assert found.tensor_core or build.constants["PRECISION"] == "ieee", found


def test_no_build_is_left_out():
    found = {(number, build.dtype, build.head_dim) for number in ARCHITECTURES for build in builds(number)}
    assert found == {tuple(cell.values) for cell in cells()}


def one_build(kernel: object) -> Build:
    return next(b for b in builds(90) if b.kernel is kernel and b.dtype == "bf16" and b.head_dim == 128)


@pytest.mark.parametrize(
    ("kernel", "q_per_kv"),
    [
        (decode.decode_kernel, 1),
        (extend.extend_kernel, 5),
        (decode.decode_kernel, 16),
        pytest.param(extend.extend_kernel, 1, marks=pytest.mark.thorough),
        pytest.param(decode.decode_kernel, 5, marks=pytest.mark.thorough),
        pytest.param(extend.extend_kernel, 16, marks=pytest.mark.thorough),
    ],
)
def test_other_group_sizes_compile_as_well(kernel, q_per_kv):
    build = one_build(kernel)
    build = dataclasses.replace(build, constants=build.constants | {"Q_PER_KV": q_per_kv})
    found = compile_build(build, 90)
    assert found.spilled_bytes == 0, found
    assert found.async_depth >= 2, found


@pytest.mark.parametrize("kernel", [decode.decode_kernel, extend.extend_kernel, decode.combine_kernel])
def test_partial_heads_compile_as_well(kernel):
    build = next(b for b in builds(90) if b.kernel is kernel and b.dtype == "bf16" and b.head_dim == 128)
    more = {name: True for name in ("PARTIAL", "LSE") if name in build.constants}
    found = compile_build(dataclasses.replace(build, constants=build.constants | more), 90)
    assert found.spilled_bytes == 0, found
    assert kernel is decode.combine_kernel or found.async_depth >= 2, found


@pytest.mark.parametrize("kernel", [decode.combine_kernel, extend.extend_kernel, extend.combine_tiles_kernel])
def test_learned_sinks_compile_as_well(kernel):
    build = one_build(kernel)
    constants = {name: value for name, value in build.constants.items() if name != "sinks_ptr"}
    found = compile_build(
        dataclasses.replace(build, types=build.types | {"sinks_ptr": "*bf16"}, constants=constants), 90
    )
    assert found.spilled_bytes == 0, found


@pytest.mark.parametrize(
    ("kernel", "output"), [(append.append_kernel, "output_ptr"), (decode.decode_kernel, "gate_output_ptr")]
)
def test_keys_alone_are_appended_without_a_gate(kernel, output):
    """Of other scorers, others write what they need."""
    build = one_build(kernel)
    gone = ("features_ptr", output, "inputs_ptr")
    types = {name: kind for name, kind in build.types.items() if name not in gone}
    constants = build.constants | dict.fromkeys(gone) | {"FEATURES": 0}
    found = compile_build(dataclasses.replace(build, types=types, constants=constants), 90)
    assert found.spilled_bytes == 0, found
    assert found.narrow_loads < compile_build(build, 90).narrow_loads


@pytest.mark.parametrize("kernel", [decode.decode_kernel, extend.extend_kernel, seal.score_kernel, seal.gather_kernel])
def test_segments_in_one_piece_compile_as_well(kernel):
    """Chunks, and open segments at ratio 1. Nothing is looked up for them."""
    in_pages = one_build(kernel)
    whole = in_pages.constants | {"TOKENS": SEGMENT, "PAGES": 1}
    paged, found = (compile_build(one, 90) for one in (in_pages, dataclasses.replace(in_pages, constants=whole)))
    assert found.spilled_bytes == 0, found
    assert found.wide_loads == paged.wide_loads
    assert found.narrow_loads < paged.narrow_loads
    assert kernel not in ATTENTION or found.async_depth >= 2, found


@pytest.mark.parametrize("kernel", [decode.decode_kernel, extend.extend_kernel])
@pytest.mark.parametrize("tokens", [1, 12, 64, 200])
@pytest.mark.thorough
def test_pages_of_any_size_compile_as_well(kernel, tokens):
    build = one_build(kernel)
    own = build.constants | {"TOKENS": tokens, "PAGES": -(-SEGMENT // tokens)}
    found = compile_build(dataclasses.replace(build, constants=own), 90)
    assert found.spilled_bytes == 0, found
    assert found.async_depth >= 2, found


@pytest.mark.parametrize("kernel", [decode.decode_kernel, extend.extend_kernel])
def test_the_first_gpus_with_e4m3_take_it_as_well(kernel):
    """Compute capability 8.9, as `kernel_choice.check_cache` says; on 8.6 Triton refuses."""
    build = next(b for b in builds(89) if b.kernel is kernel and b.dtype == "fp8e4nv" and b.head_dim == 128)
    assert compile_build(build, 89).spilled_bytes == 0
    with pytest.raises(triton.CompilationError, match="fp8e4nv not supported"):
        compile_build(build, 86)


def test_the_checks_see_what_they_look_for():
    """A tile that is far too large spills, and a loop of one stage is not pipelined."""
    build = one_build(extend.extend_kernel)
    huge = dataclasses.replace(build, constants=build.constants | {"BLOCK_N": 128}, warps=4)
    assert compile_build(huge, 90).spilled_bytes > 0
    one_stage = dataclasses.replace(build, constants=build.constants | {"STAGES": 1})
    assert compile_build(one_stage, 90).async_depth == 0


def test_the_page_names_the_triton_that_does_not_spill():
    """What holds for one compiler is not claimed for others, nor written where it does not hold."""
    fine = Resources("extend", 90, "fp32", 128, 231, 76 << 10, 0, 9, 1, 2, "HMMA", "32x16")
    assert f"With triton {triton.__version__} no kernel spills a register." in markdown([fine])
    spilled = markdown([fine, dataclasses.replace(fine, spilled_bytes=72, architecture=80)])
    assert f"With triton {triton.__version__} registers spill: extend fp32 128 at 8.0 (72 bytes)." in spilled
    assert "no kernel spills a register" not in spilled
    page = (Path(__file__).parent.parent / "benchmarks" / "results" / "kernel-resources.md").read_text()
    assert re.search(r"With triton \d+\.\d+\.\d+ no kernel spills a register\.", page)

"""Triton kernels compiled for every promised GPU, without one: nothing spills, loads are wide, loops are pipelined.

What this cannot show is speed, or races.
"""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.kernel_resources import ARCHITECTURES, Build, builds, compile_build
from sgl_ragged.attention.kernels import decode, extend

# Shared memory that one CTA may have, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


ATTENTION = (decode.decode_kernel, extend.extend_kernel)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills_and_pipelined(architecture):
    for build in builds(architecture):
        # Kernels that only move rows are compiled in every variant for one architecture, and in one for the others.
        one_variant = (build.dtype, build.head_dim) in (("bf16", 128), ("fp32", 0))
        if architecture != 90 and build.kernel not in ATTENTION and not one_variant:
            continue
        found = compile_build(build, architecture)
        assert found.spilled_bytes == 0, found
        assert found.shared_bytes <= SHARED_LIMIT[architecture], found
        if build.kernel in ATTENTION:
            assert found.wide_loads > found.narrow_loads, found
            assert found.async_depth >= 2, found
            # The fp32 tile of 256 dimensions computes in plain float32.
            assert found.tensor_core or build.constants["PRECISION"] == "ieee", found


def one_build(kernel: object) -> Build:
    return next(b for b in builds(90) if b.kernel is kernel and b.dtype == "bf16" and b.head_dim == 128)


@pytest.mark.parametrize("q_per_kv", [1, 5, 16])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_other_group_sizes_compile_as_well(kernel, q_per_kv):
    build = one_build(kernel)
    build = dataclasses.replace(build, constants=build.constants | {"Q_PER_KV": q_per_kv})
    found = compile_build(build, 90)
    assert found.spilled_bytes == 0, found
    assert found.async_depth >= 2, found


@pytest.mark.parametrize("kernel", [decode.decode_kernel, extend.extend_kernel, decode.combine_kernel])
def test_parts_of_heads_compile_as_well(kernel):
    build = next(b for b in builds(90) if b.kernel is kernel and b.dtype == "bf16" and b.head_dim == 128)
    found = compile_build(dataclasses.replace(build, constants=build.constants | {"PARTIAL": True}), 90)
    assert found.spilled_bytes == 0, found
    assert kernel is decode.combine_kernel or found.async_depth >= 2, found


def test_the_checks_see_what_they_look_for():
    """A tile that is far too large spills, and a loop of one stage is not pipelined."""
    build = one_build(extend.extend_kernel)
    huge = dataclasses.replace(build, constants=build.constants | {"BLOCK_N": 128}, warps=4)
    assert compile_build(huge, 90).spilled_bytes > 0
    one_stage = dataclasses.replace(build, constants=build.constants | {"STAGES": 1})
    assert compile_build(one_stage, 90).async_depth == 0

"""Which operations serve, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgl_ragged.attention.kernel_choice import choose_kernel
from sgl_ragged.attention.kernels.tiles import check_shape
from sgl_ragged.errors import RaggedConfigError


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        ("auto", "cuda", "triton"),
        ("auto", "cpu", "numba"),
        ("auto", "xpu", "torch"),
        ("torch", "cpu", "torch"),
        ("torch", "cuda", "torch"),
        ("triton", "cuda", "triton"),
        ("flashinfer", "cuda", "flashinfer"),
    ],
)
def test_auto_is_triton_on_gpus_and_numba_on_cpus(asked, device, chosen):
    assert choose_kernel(asked, device) == chosen


@pytest.mark.parametrize("asked", ["triton", "flashinfer"])
def test_gpu_kernels_are_refused_without_a_gpu(asked):
    with pytest.raises(RaggedConfigError, match=f"--ragged-kernel {asked} needs an NVIDIA GPU, the device is cpu"):
        choose_kernel(asked, "cpu")


def test_numba_is_refused_on_a_gpu():
    with pytest.raises(RaggedConfigError, match="--ragged-kernel numba needs a CPU, the device is cuda; use auto"):
        choose_kernel("numba", "cuda")


@pytest.mark.parametrize(("head_dim", "q_per_kv"), [(72, 4), (0, 4), (272, 4), (512, 4), (128, 17)])
def test_heads_that_the_kernels_cannot_take_are_refused(head_dim, q_per_kv):
    with pytest.raises(RaggedConfigError, match=f"not {head_dim} and {q_per_kv}; use --ragged-kernel torch"):
        check_shape(head_dim, q_per_kv)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 240, 256])
def test_heads_that_divide_by_16_are_taken(head_dim):
    check_shape(head_dim, 4)


def test_choosing_needs_neither_triton_nor_sglang():
    """Flags are registered while SGLang is being imported."""
    script = """
import sys
for name in ("triton", "sglang"):
    sys.modules[name] = None
import sgl_ragged.attention.kernel_choice, sgl_ragged.attention.kernels.tiles, sgl_ragged.launch.command_line
"""
    subprocess.run([sys.executable, "-c", script], check=True)

"""Resident CTAs from registers, warps and shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ragged.attention.occupancy import KNOWN_LIMITS, Resources, ctas_per_sm, device_limits, resident_ctas
from sgl_ragged.errors import RaggedConfigError

SM_80, SM_90 = KNOWN_LIMITS[8, 0], KNOWN_LIMITS[9, 0]


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "expected"),
    [
        (0, 1, 0, 32),  # nothing but the limit on CTAs
        (32, 4, 0, 16),  # 64 warps
        (128, 4, 0, 4),  # 65536 / (128 * 128)
        (129, 4, 0, 3),  # 136 after rounding to 8: 15 warps, of which whole fours are 12
        (108, 4, 70 << 10, 3),  # 228 KB / 71 KB
        (108, 4, 75 << 10, 3),  # 76 KB each, and all of it is taken
        (108, 4, (75 << 10) + 1, 2),
        (240, 4, 112 << 10, 2),
        (255, 8, 0, 1),
        (64, 4, 228 << 10, 0),  # the driver's kilobyte does not fit beside it
        (40, 6, 0, 8),  # 1280 a warp: 51 warps, of which whole fours are 48
    ],
)
def test_ctas_per_sm(registers, warps, shared, expected):
    assert ctas_per_sm(registers, warps, shared, SM_90) == expected


def test_less_shared_memory_holds_fewer():
    assert ctas_per_sm(108, 4, 70 << 10, SM_80) == 2


def properties(**changes) -> SimpleNamespace:
    told = {
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_multiprocessor": 233472,
        "max_threads_per_multi_processor": 2048,
    } | changes
    return SimpleNamespace(**{name: value for name, value in told.items() if value is not None})


def test_limits_told_by_torch_are_those_of_the_table():
    assert device_limits(properties()) == SM_90


def test_what_torch_does_not_tell_comes_from_the_table():
    silent = properties(
        regs_per_multiprocessor=None, shared_memory_per_multiprocessor=None, max_threads_per_multi_processor=None
    )
    assert device_limits(silent) == SM_90


def test_torch_is_believed_before_the_table():
    assert device_limits(properties(shared_memory_per_multiprocessor=1 << 17)).shared_bytes == 1 << 17


def test_unknown_gpu_is_refused_and_not_guessed():
    with pytest.raises(RaggedConfigError, match=r"13\.7.*ctas"):
        device_limits(properties(major=13, minor=7))


def test_resident_ctas_of_a_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties())
    kernel = SimpleNamespace(n_regs=108, n_spills=0, metadata=SimpleNamespace(shared=70 << 10, num_warps=4))
    assert resident_ctas(kernel) == 3 * 132


def test_handles_are_made_first():
    kernel = SimpleNamespace(metadata=SimpleNamespace(shared=1, num_warps=8))
    kernel._init_handles = lambda: kernel.__dict__.update(n_regs=64, n_spills=0)
    assert Resources.of(kernel) == Resources(registers=64, shared_bytes=1, warps=8, spills=0)

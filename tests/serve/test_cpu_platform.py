"""The platform class for CPUs without AMX, next to the one that SGLang has for CPUs with AMX."""

from __future__ import annotations

import inspect

import pytest
import torch
from sglang.srt.platforms import cpu, current_platform
from sglang.srt.platforms.interface import SRTPlatform

from sgl_ragged.serve.cpu_platform import X86CpuPlatform

ARGUMENTS = {
    "algorithm": "DFLASH",
    "backend": "torch_native",
    "device": torch.device("cpu"),
    "device_id": 0,
    "kind": "mha",
    "local_rank": 0,
    "model": None,
    "phase": "draft_decode",
    "quant": "fp8",
    "quantization": "fp8",
    "server_args": None,
}
"""What SGLang gives to methods of a platform, by the name of the parameter."""

UNANSWERED = {"get_default_speculative_draft_attention_backend"}
"""SGLang catches NotImplementedError of these. It asks for DFLASH, which the platform has refused before."""


def names() -> list[str]:
    return [name for name, _ in inspect.getmembers(SRTPlatform, callable) if not name.startswith("_")]


def answer(platform: SRTPlatform, name: str) -> object:
    """What a method returns. Raises KeyError for a parameter without a value in ARGUMENTS."""
    method = getattr(platform, name)
    wanted = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    return method(**{one.name: ARGUMENTS[one.name] for one in wanted})


@pytest.fixture(autouse=True)
def own_device_module(monkeypatch):
    """A platform's `init_backend` sets it for the life of a worker."""
    monkeypatch.setattr(torch, "get_device_module", torch.get_device_module)


@pytest.mark.parametrize("name", names())
def test_every_method_of_a_platform_is_answered(name):
    """One that is not ends the scheduler when SGLang calls it."""
    if name in UNANSWERED:
        with pytest.raises(NotImplementedError):
            answer(X86CpuPlatform(), name)
        return
    answer(X86CpuPlatform(), name)


def test_answers_are_those_of_the_platform_in_sglang():
    own, theirs = X86CpuPlatform(), cpu.CpuSRTPlatform()
    differ = set()
    for name in names():
        try:
            other = answer(theirs, name)
        except NotImplementedError:
            continue
        # Memory in use changes between two calls; context managers are new objects.
        if isinstance(other, int | float | tuple) and not isinstance(other, bool):
            continue
        if name not in ("reindex_device_id", "inference_mode") and answer(own, name) != other:
            differ.add(name)
    # Out-of-tree platforms must return strings for devices, and get another path for locations of drafts.
    assert differ == {"is_cpu", "is_out_of_tree", "get_device", "get_speculative_cache_locs_fn"}
    assert theirs.capabilities.graph_capture
    # SGLang captures graphs on CPUs by torch.compile over kernels that need AMX.
    assert not own.capabilities.graph_capture


@pytest.mark.parametrize("activities", [["CPU", "GPU"], ["CPU"], ["X86_CPU"]])
def test_both_profilers_of_sglang_start_and_stop(activities, tmp_path):
    from sglang.srt.utils.profile_utils import _ProfilerBase

    assert isinstance(current_platform, X86CpuPlatform), "this machine has an accelerator"
    profiler = _ProfilerBase.create(
        activities,
        with_stack=False,
        record_shapes=False,
        output_dir=str(tmp_path),
        output_prefix="",
        output_suffix="",
        profile_id="test",
        cpu_group=None,
        first_rank_in_node=True,
    )
    assert len(profiler.inners) == 1
    profiler.start()
    torch.ones(4).sum()
    profiler.inners[0].torch_profiler.stop()


def test_the_device_that_sglang_synchronizes_is_the_cpu():
    """Also where PyTorch was built for CUDA, as the one is that SGLang's wheel asks for."""
    for _ in range(2):
        X86CpuPlatform().init_backend()
    assert torch.get_device_module() is torch.cpu
    assert torch.get_device_module("cuda") is torch.cuda
    torch.get_device_module().synchronize()
    # Compiled code of models goes on to be traced: dynamo knows the function by what it wraps.
    compiled = torch.compile(lambda x: torch.sin(x), backend="eager")
    assert compiled(torch.zeros(1)).item() == 0

"""The platform class that `sgl_ragged.serve.platform` names; imports SGLang."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sgl_ragged.features.drafts import cpu_workers
from sgl_ragged.features.drafts.torch_verify import extend_locations

_BY_MODEL = ("STANDALONE", "EAGLE", "EAGLE3")
"""SGLang's names of algorithms with a draft model; it has renamed NEXTN to EAGLE before it reads this."""


_named_device_module = torch.get_device_module


@functools.lru_cache(None)  # As PyTorch's own: its compiler looks for __wrapped__.
def _device_module(device: torch.device | str | None = None) -> ModuleType:
    """Replace `torch.get_device_module` on a CPU-only machine: torch.cpu unless a device is given."""
    return _named_device_module("cpu" if device is None else device)


class X86CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An x86 CPU with PyTorch's own operators in place of SGLang's AMX kernels."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        # SGLang's argument resolution splits what an out-of-tree platform returns at ":", so it must be a string.
        return "cpu"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        # PyTorch names the device it was built for, torch.cuda with SGLang's wheel, also where there is none. SGLang
        # synchronizes that device, in /release_memory_occupation among others, which ends the scheduler.
        torch.get_device_module = _device_module

    def get_torch_profiler_activity_str(self) -> str:
        # SGLang profiles "CPU" on every platform. With that name here as well, SGLANG_PROFILE_V2 starts two profilers,
        # which write the same file.
        return "X86_CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in _BY_MODEL

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        if algorithm == "NGRAM":
            return cpu_workers.worker_of_ngrams()
        return cpu_workers.draft_model_worker(algorithm) if algorithm in _BY_MODEL else None

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return extend_locations

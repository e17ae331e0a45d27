"""CPU platform: lets the unmodified SGLang wheel serve on any x86 CPU, without AMX and without an accelerator."""

from __future__ import annotations

import os
import platform

PLATFORM = "sgl_ragged.serve.cpu_platform.X86CpuPlatform"


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class path where nothing else can serve, else None.

    It stands back for any accelerator, and for SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1).
    """
    import torch

    if os.getenv("SGLANG_USE_CPU_ENGINE", "0") == "1" or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    has_device = (
        torch.cuda.is_available()
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        or any(getattr(getattr(torch, name, None), "is_available", bool)() for name in ("npu", "hpu", "musa"))
    )
    return None if has_device else PLATFORM

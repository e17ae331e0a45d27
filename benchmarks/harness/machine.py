"""What a benchmark was run on, and with which versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """Processor, cores, memory, accelerators and versions, as plain values."""
    import torch

    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "hardware_threads": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerators": accelerators,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("sglang", "sgl-ragged", "torch")},
    }


def model_settings(model: str) -> dict[str, str | None]:
    """A model's folder, and sixteen hexadecimal digits of its config.json; None where there is none."""
    config = Path(model) / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else None
    return {"model": Path(model).resolve().name, "model_config": digest}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""What a measurement was taken on."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_blocks import flashinfer_calls


def describe(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flashinfer": flashinfer_calls.version(),
        "commit": _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(command: list[str]) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip() or None

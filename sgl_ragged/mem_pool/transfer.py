"""Transfer of small tables from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 copies on the device, sent as one; each starts 16 bytes aligned, which kernels are compiled for.

    Does not wait for the device.
    """
    starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)])
    packed = np.zeros(int(starts[-1]), np.int32)
    for array, start in zip(arrays, starts[:-1], strict=True):
        packed[start : start + array.size] = array.ravel()
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()
    sent = host.to(device, non_blocking=True)
    return [
        sent[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts[:-1].tolist(), strict=True)
    ]

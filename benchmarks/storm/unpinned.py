"""SGLang's server with adapters on a CPU: it asks for pinned memory there, which only machines with a GPU have."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **more: Any) -> torch.Tensor:
        more.pop("pin_memory", None)
        return make(*args, **more)

    return made


if __name__ == "__main__":
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)

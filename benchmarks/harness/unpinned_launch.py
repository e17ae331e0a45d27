"""SGLang's launcher for LoRA on CPUs: `python -m benchmarks.harness.unpinned_launch FLAGS`.

SGLang serves adapters with plain torch operations (`--lora-backend torch_native`), but asks for pinned memory on the
way, which only a machine with an accelerator has. Here it gets ordinary memory; nothing else differs.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable

import torch

MAKERS = ("tensor", "empty", "zeros")
"""Functions of torch that SGLang's LoRA asks for pinned memory."""

UNPINNED_LAUNCH = (sys.executable, "-m", "benchmarks.harness.unpinned_launch")


def unpin() -> None:
    """Let requests for pinned memory be answered with ordinary memory, in this process and its forks."""

    def ordinary(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
            return make(*args, **more)

        return made

    for name in MAKERS:
        setattr(torch, name, ordinary(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    unpin()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)

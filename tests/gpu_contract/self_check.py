"""The harness itself: that it sees what it is there to see. `python -m tests.gpu_contract.self_check`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.gpu_contract import fake_runtime, table
from tests.gpu_contract.fake_tensor import CAPTURED, FakeDevice
from tests.gpu_contract.recording import REC


@triton.jit
def nothing_kernel(target_ptr, count, BLOCK: tl.constexpr):
    tl.store(target_ptr + tl.arange(0, BLOCK), count)


WAITS = {
    "item": lambda x, mask: x[0].item(),
    "tolist": lambda x, mask: x.tolist(),
    "cpu": lambda x, mask: x.cpu(),
    "bool": lambda x, mask: bool(mask[0]),
    "nonzero": lambda x, mask: mask.nonzero(),
    "a mask": lambda x, mask: x[mask],
    "an index of the host": lambda x, mask: x[torch.tensor([1, 0])],
    "a size on the device": lambda x, mask: torch.empty(x[1], device="cuda"),
    "a blocking copy": lambda x, mask: torch.ones(3).to("cuda"),
    "synchronize": lambda x, mask: torch.cuda.synchronize(),
}


def kinds(ask) -> set[str]:
    REC.phases.clear()
    with REC.during("asked"):
        ask()
    return {event.kind for event in REC.phases["asked"]}


def check() -> None:
    x = torch.arange(4, device="cuda")
    mask = x > 1
    for name, ask in WAITS.items():
        assert "wait" in kinds(lambda ask=ask: ask(x, mask)), name
    assert kinds(lambda: x.masked_fill(mask, 0) + 1) == {"other"}
    assert kinds(lambda: x[1:].view(3, 1)) == set()
    assert kinds(lambda: torch.ones(3).pin_memory().to("cuda", non_blocking=True)) == {"to_device"}
    assert "mix" in kinds(lambda: torch.add(x, torch.arange(4)))
    with REC.capture():
        assert "capture" in kinds(lambda: x[0].item())
        assert "allocation" in kinds(lambda: x + 1)

    launch = nothing_kernel[(1,)]
    launch(x, 32, BLOCK=4)
    REC.serving = True
    assert kinds(lambda: launch(x, 48, BLOCK=4)) == {"triton"}
    for variant in (lambda: launch(x, 33, BLOCK=4), lambda: launch(x[1:], 32, BLOCK=4), lambda: launch(x, 32, BLOCK=2)):
        assert "variant" in kinds(variant)
    assert "mix" in kinds(lambda: launch(torch.ones(4), 32, BLOCK=4))
    assert "error" in kinds(lambda: nothing_kernel[(0,)](x, 32, BLOCK=4))
    REC.serving = False

    CAPTURED.forget()
    buffer = torch.zeros(4, device="cuda")
    with REC.capture():
        launch(buffer, 32, BLOCK=4)
        launch(x + 1, 32, BLOCK=4)
    assert CAPTURED.freed() == []
    del buffer
    assert CAPTURED.freed() == ["nothing_kernel target_ptr"]

    known = {"a step": {"triton": [1, 2], "wait": [1, 0]}}
    assert not list(table.rises({"a step": {"triton": [1, 2]}}, known))
    assert list(table.falls({"a step": {"triton": [1, 2]}}, known)) == ["a step: wait [1, 0] has become [0, 0]"]
    for more in ({"triton": [1, 2.5]}, {"wait": [2, 0]}, {"mix": [1, 0]}, {"faults": {"variant": 1}}):
        assert list(table.rises({"a step": more}, known)), more
    assert list(table.rises({"another": {}}, known))


if __name__ == "__main__":
    fake_runtime.install()
    with FakeDevice():
        check()

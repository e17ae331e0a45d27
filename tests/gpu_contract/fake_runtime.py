"""CUDA's run time and Triton's launches, recorded. `install` takes nothing back: it is for a process of its own."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from tests.gpu_contract.fake_tensor import CAPTURED, FakeCuda, is_pinned, pin
from tests.gpu_contract.recording import REC

GRID_LIMIT = 65535
"""Of the second and third dimension."""


class FakeEvent:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timing = enable_timing

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        REC.add("wait", "event.synchronize")

    def elapsed_time(self, other: FakeEvent) -> float:
        if not (self.timing and other.timing):
            raise RuntimeError("both events must be created with argument 'enable_timing=True'.")
        return 1.0


class FakeStream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or FakeEvent()

    def synchronize(self) -> None:
        REC.add("wait", "stream.synchronize")

    def query(self) -> bool:
        return True


PROPERTIES = SimpleNamespace(
    name="a GPU of compute capability 9.0", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132,
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472, max_threads_per_multi_processor=2048,
    warp_size=32, shared_memory_per_block_optin=232448, uuid="0",
)  # fmt: skip


def install() -> None:
    _install_cuda()
    JITFunction.run = _run  # type: ignore[method-assign]
    _install_pinning()
    # Numbers that code makes of host tensors are not lifted to the device.
    torch._C._set_only_lift_cpu_tensors(True)


def _install_cuda() -> None:
    stream = FakeStream()
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_initialized": lambda: False,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "synchronize": lambda device=None: REC.add("wait", "cuda.synchronize"),
        "set_device": lambda device: None,
        "is_current_stream_capturing": lambda: REC.capturing,
        "is_bf16_supported": lambda *_, **__: True,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)


def _install_pinning() -> None:
    """`torch.tensor` pins where no mode sees it."""
    make = torch.tensor

    @functools.wraps(make)
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return pin(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

    torch.tensor = tensor


class Compiled:
    """What a launch returns, with about the resources that compiled attention kernels have."""

    def __init__(self, name: str, warps: int) -> None:
        registers, shared = {"decode_kernel": (96, 70), "extend_kernel": (238, 128)}.get(name, (64, 1))
        self.n_regs, self.n_spills = registers, 0
        self.metadata = SimpleNamespace(shared=shared << 10, num_warps=warps)


def specialised(parameter: Any, value: Any) -> Any:
    """By what Triton compiles anew, of one argument."""
    if parameter.is_constexpr:
        return value.__name__ if callable(value) else value
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % 16 == 0 if isinstance(value, FakeCuda) else True
        return f"*{value.dtype}", aligned and not parameter.do_not_specialize_on_alignment
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        wide = "i64" if not -(2**31) <= value < 2**31 else "i32"
        if parameter.do_not_specialize:
            return wide
        return wide, "1" if value == 1 else value % 16 == 0
    return "fp32"


def _choose(values: Any) -> None:
    positions = values["positions_ptr"].inner
    positions.copy_(torch.arange(positions.shape[-1]).expand_as(positions))


def _copy_rows(values: Any) -> None:
    source, target, from_rows, to_rows = (
        values[name].inner if isinstance(values[name], FakeCuda) else values[name]
        for name in ("source_ptr", "target_ptr", "source_rows_ptr", "target_rows_ptr")
    )
    unit, start, begin = values["UNIT"], values["source_start"], values["target_start"]
    words = values["length"] * unit
    for one, other in zip(from_rows.tolist(), to_rows.tolist(), strict=True):
        at, to = ((one * values["source_stride"] + start) * unit, (other * values["target_stride"] + begin) * unit)
        target.view(-1)[to : to + words] = source.reshape(-1)[at : at + words]


STAND_INS = {"choose_kernel": _choose, "copy_rows_kernel": _copy_rows}
"""Of kernels that write what is an index of other tensors."""


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Compiled:
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
    bound = self.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    name, values = self.fn.__name__, bound.arguments
    grid = tuple(grid(values) if callable(grid) else grid)
    key = tuple((one.name, specialised(one, values[one.name])) for one in self.params)
    key = (name, ("warps", options.get("num_warps")), *key)
    for one in self.params:
        value = values[one.name]
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeCuda) and not is_pinned(value):
            REC.add("mix", name, note=f"{one.name} is on the host")
        if isinstance(value, FakeCuda) and REC.capturing:
            CAPTURED.read(name, one.name, value)
    if REC.listens and REC.serving and key not in REC.compiled:
        REC.add("variant", name, note=_difference(key))
    REC.compiled[key] = None
    if 0 in grid or any(size > GRID_LIMIT for size in grid[1:]):
        REC.add("error", name, note=f"the driver refuses a grid of {grid}")
    REC.add("triton", name, note=f"grid {grid}")
    if REC.listens:
        REC.launches.append((name, grid))
    if name in STAND_INS:
        STAND_INS[name](values)
    return Compiled(name, options.get("num_warps", 4))


def _difference(key: tuple) -> str:
    """In which arguments a kernel differs from the one of those compiled that is nearest to it."""
    mine, best = dict(key[1:]), None
    for other in REC.compiled:
        if other[0] == key[0]:
            theirs = dict(other[1:])
            found = [f"{name}={value}, not {theirs.get(name)}" for name, value in mine.items() if theirs[name] != value]
            if best is None or len(found) < len(best):
                best = found
    return "was never compiled" if best is None else "; ".join(sorted(best))

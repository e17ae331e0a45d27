"""Tensors that claim to be on cuda:0, and the mode that sees every operation on them.

Their numbers are in host memory, so code goes on behind a wait with the right ones, where torch computed them; what
Triton's kernels would write stays as it was.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_contract.recording import REC

# Tensors of a device that torch was not able to open can be made only where this has been called.
torch._C._ensureCUDADeviceGuardSet()

SEVERAL = {"topk": 3, "sort": 3, "argsort": 3, "median": 4, "isin": 6, "logsumexp": 6}
"""Operations that launch more than one kernel, roughly."""

SILENT = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
    "_unsafe_view", "sym_size", "sym_stride",
}  # fmt: skip
"""Those that launch none."""

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Those that take memory and nothing else."""

HOST_NEEDS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "is_nonzero",
}  # fmt: skip
"""Those whose result, or its size, the host needs."""

STAGED_BYTES = 65536
"""Pageable memory of more than that is copied while the host waits."""

_pinned_storages: set[int] = set()
_pinned: list[torch.Tensor] = []


class FakeCuda(torch.Tensor):
    """Claims cuda:0; `inner` holds the numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> FakeCuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda:0"),
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return FakeDevice.run(func, args, kwargs or {})

    def tolist(self) -> Any:
        REC.add("wait", "tolist")
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: Any) -> None:
        return None

    def data_ptr(self) -> int:
        # CUDA's allocator aligns more than any kernel asks for.
        return 0x7F0000000000 + self.storage_offset() * self.element_size()

    def __repr__(self, **_: Any) -> str:
        return f"FakeCuda({self.inner})"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which counts as pinned from now on."""
    _pinned.append(tensor)
    _pinned_storages.add(tensor.untyped_storage().data_ptr())
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned_storages


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class FakeDevice(TorchDispatchMode):
    """While it is on, operations on fakes run on the host, and what they would do on a device is recorded."""

    # Torch looks for a mode of this kind before it opens the device.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return FakeDevice.run(func, args, kwargs or {})

    @staticmethod
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if not any(isinstance(one, FakeCuda) for one in tensors) and not _on_device(kwargs.get("device")):
            return _on_host(func, name, args, kwargs)
        _record(func, name, args, kwargs, tensors)
        own_args, own_kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, FakeCuda) else leaf, (args, kwargs))
        given = {key: value for key, value in own_kwargs.items() if key != "pin_memory"}
        if _on_device(given.get("device")):
            given["device"] = torch.device("cpu")
        result = func(*own_args, **given)
        if name in UNWRITTEN:
            # Numbers that can be looked up, where a kernel would write them.
            result.zero_()
        if name == "_to_copy" and result is own_args[0]:
            result = result.clone()
        to_host = name == "_to_copy" and kwargs.get("device") is not None and not _on_device(kwargs["device"])
        return result if to_host or name == "_local_scalar_dense" else _wrapped(func, args, kwargs, result)


def _wrapped(func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns):
        outs = [kwargs[one.name] for one in func._schema.arguments if one.is_out and kwargs.get(one.name) is not None]
        if not outs:
            return args[0]
        return outs[0] if len(outs) == 1 else tuple(outs)
    fresh = not any(one.alias_info is not None for one in func._schema.returns)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if REC.capturing and fresh:
            CAPTURED.made(leaf)
        return FakeCuda(leaf)

    return tree_map(wrap, result)


def _on_host(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    if name == "is_pinned":
        return is_pinned(args[0])
    if name in ("_pin_memory", "pin_memory"):
        return pin(args[0].clone())
    if kwargs.get("pin_memory"):
        return pin(func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"}))
    return func(*args, **kwargs)


def _record(func: Any, name: str, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> None:
    if REC.capturing:
        for one in tensors:
            if isinstance(one, FakeCuda):
                CAPTURED.read(name, "", one)
    if name in SILENT:
        return
    if name in ("_to_copy", "copy_"):
        _record_copy(name, args, kwargs)
        return
    if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
        return
    if name in HOST_NEEDS:
        REC.add("wait", name)
    hosted = [one for one in tensors if not isinstance(one, FakeCuda)]
    launched = SEVERAL.get(name, 1)
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        for index in (one for one in args[1] if isinstance(one, torch.Tensor)):
            if not isinstance(index, FakeCuda):
                hosted = [one for one in hosted if one is not index]
                REC.add("wait", f"{name} by an index of the host")
            elif index.dtype in (torch.bool, torch.uint8):
                value = args[2] if len(args) > 2 else None
                # A number under a mask is filled in without a look for its places.
                if not isinstance(value, torch.Tensor) or isinstance(value, FakeCuda) or value.numel() != 1:
                    REC.add("wait", f"{name} by a mask")
            elif index.dtype == torch.int32:
                launched += 1
    for one in hosted:
        if one.dim() > 0:
            REC.add("mix", name, note=f"with a host tensor {tuple(one.shape)}")
        elif name == "where":
            REC.add("wait", f"{name} with a number of the host")
    if not tensors or any(one.numel() for one in tensors):
        REC.add("other", name, launched)


def _record_copy(name: str, args: tuple, kwargs: dict) -> None:
    if name == "copy_":
        target, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        to, of = isinstance(target, FakeCuda), isinstance(source, FakeCuda)
        host = source if to else target
    else:
        source = args[0]
        non_blocking = kwargs.get("non_blocking", False)
        of = isinstance(source, FakeCuda)
        to = of if kwargs.get("device") is None else _on_device(kwargs["device"])
        host = source if to else None
    if not source.numel():
        return
    if to and of:
        REC.add("other", name)
    elif to:
        REC.add("to_device", name)
        if not non_blocking or (not is_pinned(host) and source.nbytes > STAGED_BYTES):
            REC.add("wait", f"{name} to the device")
    else:
        REC.add("to_host", name)
        if not (non_blocking and host is not None and is_pinned(host)):
            REC.add("wait", f"{name} to the host")


class Captured:
    """Memory that captured launches read, and memory that was taken in their capture, which the graph keeps."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._fresh: set[int] = set()
        self._read: dict[int, tuple[str, str, Any]] = {}

    def made(self, tensor: torch.Tensor) -> None:
        REC.add("allocation", "memory")
        self._kept.append(tensor)
        self._fresh.add(tensor.untyped_storage().data_ptr())

    def read(self, kernel: str, argument: str, tensor: FakeCuda) -> None:
        storage = tensor.inner.untyped_storage()
        at = storage.data_ptr()
        if at not in self._fresh and at not in self._read:
            self._read[at] = kernel, argument, weakref.ref(storage)

    def freed(self) -> list[str]:
        """What captured launches read and nobody holds any more."""
        return [f"{kernel} {argument}" for kernel, argument, storage in self._read.values() if storage() is None]

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]


CAPTURED = Captured()

"""Triton decides when a kernel is decorated whether to interpret it: these tests need a process of their own.

`tests/test_interpreted.py` runs them; by hand: TRITON_INTERPRET=1 python -m pytest tests/kernels.
"""

import os
from importlib.metadata import version
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language
from packaging.version import Version
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def refuse_versions(triton: str, numpy: str) -> None:
    """End the run, in one line, where Triton's interpreter cannot work: before 3.7 it takes int() of whole arrays."""
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        reason = f"the interpreter of triton {triton} fails with numpy {numpy}: install numpy<2.4, or triton>=3.7"
        pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)


def _patch_once(patch_language=interpreter._patch_lang):
    """The interpreter replaces the operations of the language for every launch and every call inside a kernel: half of
    its time. Here they stay replaced; kernels that see the language by other names have it patched for them."""
    modules = (triton.language, triton.language.core)
    patched = set()

    def patch(kernel: FunctionType) -> SimpleNamespace:
        seen = tuple(any(value is module for value in kernel.__globals__.values()) for module in modules)
        if seen not in patched:
            patched.add(seen)
            patch_language(kernel)
        return SimpleNamespace(restore=lambda: None)

    return patch


TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def _convert_by_torch(convert=interpreter._convert_float):
    """Converts from and to E4M3, and from E5M2, by torch, since the interpreter rounds without a carry into the
    exponent, and reads NaN as numbers. Kernels round to E5M2 themselves (`quantize_fp8`)."""

    def converted(data, from_type, to_type, rounding):
        names = from_type.name, to_type.name
        if not any(name.startswith("fp8") for name in names):
            return convert(data, from_type, to_type, rounding)
        source, target = (TORCH[name] for name in names)
        bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        if target == torch.float8_e5m2 and bits.any():
            raise NotImplementedError("before compute capability 8.9 Triton rounds ties to E5M2 away from zero")
        found = bits.view(source).float().to(target)
        unsigned = getattr(np, f"uint{8 * target.itemsize}")
        return found.view(torch.uint8).numpy().view(unsigned).reshape(data.shape)

    return converted


if INTERPRETED:
    refuse_versions(version("triton"), version("numpy"))
    interpreter._convert_float = _convert_by_torch()
    interpreter._patch_lang = _patch_once()
    # Checks for overflow are computed, but only asserted in debug mode.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

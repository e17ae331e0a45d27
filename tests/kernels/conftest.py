"""Triton decides when a kernel is decorated whether to interpret it: these tests need a process of their own.

`tests/test_interpreted.py` runs them; by hand: TRITON_INTERPRET=1 python -m pytest tests/kernels.
"""

import os
from types import FunctionType, SimpleNamespace

import triton.language
from triton.runtime import interpreter

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


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


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter._patch_lang = _patch_once()
    # Checks for overflow are computed, but only asserted in debug mode.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

"""Functions that numba compiles, kept in the plugin's cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile_cache import cache_folder


def compile_once(
    function: Callable, signature: Any, options: dict[str, Any], constants: object, sources: Sequence[Path]
) -> Callable[..., None]:
    """Compile a function, or load it from the cache folder; where that cannot be written, compile it for this process.

    Each function has a folder of its own. In a shared one, processes that compile different functions at once may
    replace each other's files; that of the same function are equal, and numba renames them once they are complete.

    Args:
        signature: types of the arguments. options: of `numba.njit`.
        constants: what the function closes over; its `repr` tells functions apart.
        sources: files with the function and what is compiled into it.
    """
    target = numba.core.registry.cpu_target.target_context.codegen().magic_tuple()
    content = [repr((constants, target, numba.__version__)).encode(), *(path.read_bytes() for path in sources)]
    before = numba.config.CACHE_DIR
    try:
        folder = cache_folder() / "numba" / hashlib.sha256(b"".join(content)).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
        numba.config.CACHE_DIR = str(folder)
        return numba.njit([signature], cache=True, **options)(function)
    except (OSError, RaggedConfigError):
        return numba.njit([signature], **options)(function)
    finally:
        numba.config.CACHE_DIR = before

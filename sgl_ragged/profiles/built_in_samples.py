"""Identity of the built-in samples of calibration, without the calibrator: part of the profile cache's key.

The launcher imports nothing from `calib`: a folder or file of that name in the working folder would be taken for it.
"""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError

SAMPLES = 28
"""Number of samples used by default."""

MODULES = ("argparse", "calendar", "csv", "fractions", "heapq", "mailbox", "shlex", "statistics", "tarfile", "textwrap")
"""Modules of Python's library whose sources are read."""

CONTENT = "73a41b6e03bde0ba"
"""16 hex digits of what `calib.built_in` makes of texts that do not depend on Python's release; tests/test_recorder.py
computes them. Another value makes every model be calibrated again."""


def library_sources() -> tuple[str, ...]:
    """Sources of MODULES. Raises OSError where Python was installed without sources."""
    library = Path(sysconfig.get_path("stdlib"))
    return tuple((library / f"{name}.py").read_text() for name in MODULES)


def documentation() -> tuple[str, ...]:
    """Long texts behind Python's `help()`. Raises ImportError where Python was installed without them."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return tuple(text for _, text in sorted(topics.items()) if len(text) > 3000)


def samples_identity() -> str:
    """16 hex digits that change with the built-in samples and with the texts of Python's release among them.

    Raises:
        RaggedConfigError: Python was installed without its sources or documentation.
    """
    state = hashlib.sha256(f"{CONTENT} {SAMPLES}".encode())
    try:
        for text in (*documentation(), *library_sources()):
            state.update(hashlib.sha256(text.encode()).digest())
    except (ImportError, OSError) as error:
        raise RaggedConfigError(
            f"the built-in samples of calibration need the sources and documentation of Python's library ({error})"
        ) from None
    return state.hexdigest()[:16]

"""Identity of calibration's built-in samples, part of the profile cache's key, without importing the calibrator.

The launcher imports nothing from `calib`, because a file or folder of that name in the working folder would shadow it.
"""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError

SAMPLES = 28
"""Default number of samples."""

MODULES = ("argparse", "calendar", "csv", "fractions", "heapq", "mailbox", "shlex", "statistics", "tarfile", "textwrap")
"""Modules of Python's library whose sources are used."""

CONTENT = "73a41b6e03bde0ba"
"""16 hex digits over samples that `calib.built_in` makes from texts that do not depend on Python's release, computed by
tests/calib/test_built_in_samples.py. Every change of this value makes servers calibrate their models again."""


def library_sources() -> tuple[str, ...]:
    """Read the sources of MODULES. Raises OSError if Python is installed without sources."""
    library = Path(sysconfig.get_path("stdlib"))
    return tuple((library / f"{name}.py").read_text() for name in MODULES)


def documentation() -> tuple[str, ...]:
    """Read the long texts of Python's `help()`. Raises ImportError if Python is installed without them."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return tuple(text for _, text in sorted(topics.items()) if len(text) > 3000)


def samples_identity() -> str:
    """Return 16 hex digits that change with the built-in samples, including the texts of Python's release.

    Raises:
        RaggedConfigError: Python is installed without its sources or documentation.
    """
    state = hashlib.sha256(f"{CONTENT} {SAMPLES}".encode())
    try:
        for text in (*documentation(), *library_sources()):
            state.update(hashlib.sha256(text.encode()).digest())
    except (ImportError, OSError) as error:
        raise RaggedConfigError(
            f"the built-in samples of calibration need the sources and documentation of Python's library ({error}); "
            f"calibrate with samples of your own (python -m calib run --data FILE)"
        ) from None
    return state.hexdigest()[:16]

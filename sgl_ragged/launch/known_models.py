"""Find out which architectures SGLang has a class for, without importing its models, which takes half a minute."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path


@functools.cache
def _is_named(architecture: str) -> bool:
    """Return True if a source of SGLang's models has the word."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    folders = [Path(place) / "srt" / "models" for place in spec.submodule_search_locations or ()]
    word = re.compile(rf"\b{re.escape(architecture)}\b")
    return any(word.search(path.read_text()) for folder in folders for path in folder.glob("*.py"))


def has_class(architecture: str) -> bool:
    """Return False if no class of SGLang's models or of a registered package serves an architecture."""
    if os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return True
    registry = getattr(sys.modules.get("sglang.srt.models.registry"), "ModelRegistry", None)
    return (registry is not None and architecture in registry.models) or _is_named(architecture)

"""Scorers: one method per file with a pure `score()`, and the registry, to which other packages can add."""

from __future__ import annotations

from importlib.metadata import entry_points

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers.base import ALL_QUERIES, Scorer, SegmentData
from sgl_ragged.scorers.expected_attention import ExpectedAttention
from sgl_ragged.scorers.fastkvzip import FastKVzip
from sgl_ragged.scorers.gate import Gate
from sgl_ragged.scorers.h2o import H2O
from sgl_ragged.scorers.key_norm import KeyNorm
from sgl_ragged.scorers.keydiff import KeyDiff
from sgl_ragged.scorers.selection import forced_first, keep_positions, rank_positions
from sgl_ragged.scorers.snapkv import SnapKV
from sgl_ragged.scorers.streaming import Streaming
from sgl_ragged.scorers.tova import Tova
from sgl_ragged.scorers.value_key_norm import ValueKeyNorm

__all__ = [
    "ALL_QUERIES",
    "BUILT_IN",
    "ENTRY_POINTS",
    "Scorer",
    "SegmentData",
    "forced_first",
    "get_scorer",
    "keep_positions",
    "rank_positions",
    "scorer_names",
]

_CLASSES: tuple[type[Scorer], ...] = (
    ExpectedAttention,
    FastKVzip,
    Gate,
    H2O,
    KeyDiff,
    KeyNorm,
    SnapKV,
    Streaming,
    Tova,
    ValueKeyNorm,
)
BUILT_IN: dict[str, type[Scorer]] = {scorer.name: scorer for scorer in _CLASSES}

ENTRY_POINTS = "sgl_ragged.scorers"
"""Entry-point group in which other packages register subclasses of Scorer; built-in names cannot be replaced."""


def scorer_names() -> list[str]:
    """List the names of all scorers, built in and registered by other packages, sorted; the latter are not imported."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def get_scorer(name: str) -> Scorer:
    """Return the scorer called `name`.

    Raises:
        RaggedConfigError: no scorer has this name (the message lists the known ones), or another package's scorer
            cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    points = entry_points(group=ENTRY_POINTS, name=name)
    if not points:
        raise RaggedConfigError(f"unknown scorer {name!r}; known: {', '.join(scorer_names())}")
    point = next(iter(points))
    try:
        loaded = point.load()
    except Exception as error:
        raise RaggedConfigError(f"scorer {name!r} ({point.value}) cannot be loaded: {error!r}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Scorer)):
        raise RaggedConfigError(f"scorer {name!r} ({point.value}) is no subclass of sgl_ragged.scorers.Scorer")
    if loaded.name != name:
        raise RaggedConfigError(f"scorer {name!r} ({point.value}) calls itself {loaded.name!r}: use one name")
    return loaded()

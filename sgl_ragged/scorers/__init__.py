"""Scorers: one method per file, one pure `score()` each."""

from __future__ import annotations

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers.base import Scorer
from sgl_ragged.scorers.key_norm import KeyNorm
from sgl_ragged.scorers.keydiff import KeyDiff
from sgl_ragged.scorers.selection import keep_positions
from sgl_ragged.scorers.streaming import Streaming
from sgl_ragged.scorers.value_key_norm import ValueKeyNorm

__all__ = ["SCORERS", "Scorer", "get_scorer", "keep_positions"]

SCORERS: dict[str, Scorer] = {s.name: s for s in (KeyDiff(), KeyNorm(), Streaming(), ValueKeyNorm())}


def get_scorer(name: str) -> Scorer:
    """The scorer called `name`; raises RaggedConfigError that lists the known ones."""
    try:
        return SCORERS[name]
    except KeyError:
        raise RaggedConfigError(f"unknown scorer {name!r}; known: {', '.join(sorted(SCORERS))}") from None

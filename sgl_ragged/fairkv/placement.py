"""Placement of heads on ranks: the planner's result, with what serving needs of it. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_ragged.errors import RaggedConfigError


@dataclass(frozen=True, eq=False)
class Placement:
    """Heads of every layer at the ranks' places. All ranks have the same number of places in all layers.

    Args:
        heads: int64 [num_layers, ranks, places], number of the head at each place. A head may be at several places, but
            at most once on each rank.
        kept: int64 [num_layers, ranks, places], tokens of each sealed segment that are stored at the place, multiples
            of 16. They sum to the head's kept count over its places; the place on the lowest rank stores the earliest
            positions. 0 if the place stores nothing: the head there only gives the place weights, and its partial
            result is empty (log-sum-exp of minus infinity).
        mode: mode that was given to the planner.
    """

    heads: np.ndarray
    kept: np.ndarray
    mode: str

    def __post_init__(self) -> None:
        if self.heads.ndim != 3 or self.heads.shape != self.kept.shape:
            raise RaggedConfigError(
                f"heads {self.heads.shape} and kept {self.kept.shape} must be [layers, ranks, places]"
            )
        for name in ("heads", "kept"):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def of_layers(self, first: int, end: int) -> Placement:
        """Return the placement of the layers from `first` up to, but without, `end`."""
        return Placement(self.heads[first:end], self.kept[first:end], self.mode)

    @property
    def ranks(self) -> int:
        return int(self.heads.shape[1])

    @property
    def places(self) -> int:
        return int(self.heads.shape[2])

    @property
    def load(self) -> np.ndarray:
        """Tokens per sealed segment that a rank stores, and reads in a decode step: int64 [num_layers, ranks]."""
        return self.kept.sum(axis=2)

    @property
    def splits_heads(self) -> bool:
        """True if a head has more than one place in a layer."""
        ordered = np.sort(self.heads.reshape(len(self.heads), -1), axis=1)
        return bool((ordered[:, 1:] == ordered[:, :-1]).any())

    @property
    def partial(self) -> np.ndarray:
        """Places that store less than the head keeps: bool [num_layers, ranks, places]."""
        same = self.heads[:, :, :, None, None] == self.heads[:, None, None, :, :]
        return self.kept < (self.kept[:, None, None] * same).sum(axis=(3, 4))

    @property
    def first(self) -> np.ndarray:
        """Number of the head's kept tokens that lower ranks store: int64 [num_layers, ranks, places]."""
        same = self.heads[:, :, :, None, None] == self.heads[:, None, None, :, :]
        rank = np.arange(self.ranks)
        lower = (rank[:, None] > rank)[None, :, None, :, None]
        return (self.kept[:, None, None] * (same & lower)).sum(axis=(3, 4))

"""Slab layout: the position of each head's kept rows in the storage of one sealed segment.

Budgets are static, so all sealed segments of a model have the same inner layout: one table of offsets
addresses every one of them. Offsets are in elements: numbers of the KV dtype, or bytes where rows are quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from sgl_ragged.profiles.budgets import UNIT, check_segment


@dataclass(frozen=True)
class Band:
    """Heads of one layer that store equally many rows and are adjacent in the slab.

    The band's storage starts at element `offset`, relative to the layer's start: for each of its heads what the format
    says (`SlabFormat`), [len(heads), 2 (K, V), kept, head_dim] if that is wide. Attention and sealing treat a band as
    one strided view. Of the `total` tokens that each head keeps, in position order, the band stores those from `first`
    on.
    """

    heads: tuple[int, ...]
    kept: int
    offset: int
    total: int
    first: int

    @property
    def partial(self) -> bool:
        """True if other ranks store, or may store, more of these heads: attention on this rank is a part of theirs."""
        return self.kept < self.total

    @property
    def attends_open(self) -> bool:
        """True if these heads attend to the open segment here: at the one place with the earliest positions."""
        return self.first == 0 and self.kept > 0


@dataclass(frozen=True)
class SlabLayout:
    """The layout of one slab.

    Args:
        kept: int64 [num_layers, num_heads], tokens of a sealed segment that are stored for each head (n in the design).
        head_dim: elements per key and per value.
        segment: tokens per segment (S).
        total: like `kept`, what the head keeps on all ranks together, or None where that is all stored here.
        first: like `kept`, how many of those are stored on lower ranks; with `total`.
        full_heads: heads that an uncompressed cache would store here, or None for all of these.
        form: format of kept rows in the slab.
    """

    kept: np.ndarray
    head_dim: int
    segment: int
    total: np.ndarray | None = None
    first: np.ndarray | None = None
    full_heads: int | None = None
    form: SlabFormat = WIDE

    def __post_init__(self) -> None:
        check_segment(self.segment)
        self.form.check_head_dim(self.head_dim)
        kept = np.ascontiguousarray(self.kept, dtype=np.int64)
        if kept.ndim != 2 or kept.size == 0:
            raise RaggedConfigError(f"kept counts must be [layers, heads], got shape {kept.shape}")
        total = kept if self.total is None else np.ascontiguousarray(self.total, dtype=np.int64)
        first = np.zeros_like(kept) if self.first is None else np.ascontiguousarray(self.first, dtype=np.int64)
        if (kept % UNIT).any() or (total < UNIT).any() or (total > self.segment).any():
            raise RaggedConfigError(f"kept counts must be multiples of {UNIT} in [{UNIT}, {self.segment}]")
        if not kept.shape == total.shape == first.shape or (np.minimum(kept, first) < 0).any():
            raise RaggedConfigError("shares of heads must be non-negative, [layers, heads] like the kept counts")
        if (first + kept > total).any():
            raise RaggedConfigError("shares of heads must not end behind what their heads keep")
        for name, array in (("kept", kept), ("total", total), ("first", first)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def some_layers(self, layers: Sequence[int]) -> SlabLayout:
        """Return the layout of slabs that hold these layers alone."""
        own = list(layers)
        return replace(self, kept=self.kept[own], total=self.totals[own], first=self.firsts[own], full_heads=None)

    @property
    def totals(self) -> np.ndarray:
        """Rows that heads keep on all ranks, int64 [num_layers, num_heads]."""
        assert self.total is not None
        return self.total

    @property
    def firsts(self) -> np.ndarray:
        """Rows of heads that are stored on lower ranks, int64 [num_layers, num_heads]."""
        assert self.first is not None
        return self.first

    @property
    def shared(self) -> bool:
        """True if other ranks store some of the kept tokens of any of these heads."""
        return bool((self.kept < self.totals).any())

    @property
    def num_layers(self) -> int:
        return int(self.kept.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.kept.shape[1])

    @cached_property
    def bands(self) -> tuple[tuple[Band, ...], ...]:
        """Per layer, its bands in storage order: largest first, heads ascending inside a band."""
        layers = []
        shares = np.stack([self.kept, self.totals, self.firsts], axis=2)
        for rows in shares.tolist():
            offset, bands = 0, []
            for share in sorted({tuple(row) for row in rows}, reverse=True):
                heads = tuple(head for head, row in enumerate(rows) if tuple(row) == share)
                kept, total, first = share
                bands.append(Band(heads=heads, kept=kept, offset=offset, total=total, first=first))
                offset += len(heads) * self.part_elems(kept)
            layers.append(tuple(bands))
        return tuple(layers)

    def part_elems(self, kept: int) -> int:
        """Return the elements of the part of a head that keeps `kept` tokens."""
        return self.form.part_elems(kept, self.head_dim)

    @cached_property
    def layer_elems(self) -> np.ndarray:
        """int64 [num_layers]: elements of each layer's part of the slab."""
        return np.array([sum(map(self.part_elems, row)) for row in self.kept.tolist()], dtype=np.int64)

    @cached_property
    def layer_start(self) -> np.ndarray:
        """int64 [num_layers + 1]: first element of each layer's part; the last entry is `slab_elems`."""
        return np.concatenate([[0], np.cumsum(self.layer_elems)]).astype(np.int64)

    @property
    def slab_elems(self) -> int:
        return int(self.layer_start[-1])

    @cached_property
    def key_offset(self) -> np.ndarray:
        """int64 [num_layers, num_heads]: first element of each head's keys [kept, head_dim] in the slab."""
        offsets = np.empty_like(self.kept)
        for layer, bands in enumerate(self.bands):
            for band in bands:
                header = self.form.header_elems(self.head_dim) if band.kept else 0
                for place, head in enumerate(band.heads):
                    part = band.offset + place * self.part_elems(band.kept)
                    offsets[layer, head] = self.layer_start[layer] + part + header
        return offsets

    @cached_property
    def value_offset(self) -> np.ndarray:
        """int64 [num_layers, num_heads]: first element of each head's values [kept, head_dim] in the slab."""
        return self.key_offset + self.kept * self.form.key_elems(self.head_dim)

    def slab_bytes(self, itemsize: int) -> int:
        """Return the bytes of one slab for a KV dtype of `itemsize` bytes."""
        return self.slab_elems * self.form.itemsize(itemsize)

    def full_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one token in an uncompressed cache."""
        return self.num_layers * 2 * (self.full_heads or self.num_heads) * self.head_dim * itemsize

    @property
    def mean_kept_share(self) -> float:
        """Kept / all tokens of a sealed segment, over all heads: the mean of n / S."""
        return float(self.kept.sum()) / (self.num_layers * (self.full_heads or self.num_heads)) / self.segment

    def byte_share(self, itemsize: int) -> float:
        """Return kept / full bytes of a sealed segment, for a KV dtype of `itemsize` bytes."""
        return self.slab_bytes(itemsize) / self.full_bytes_per_token(itemsize) / self.segment

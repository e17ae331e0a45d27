"""Slab layout: where each head's kept rows lie inside the storage of one sealed segment.

Budgets are static, so all sealed segments of a model have the same inner layout: one table of offsets
addresses every one of them (design section 2). Offsets are in elements of the KV dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sgl_ragged.budgets import UNIT, check_segment
from sgl_ragged.errors import RaggedConfigError


@dataclass(frozen=True)
class Band:
    """Heads of one layer that keep equally many tokens and lie side by side in the slab.

    The band's storage is [len(heads), 2 (K, V), kept, head_dim] elements from `offset`, relative to the
    layer's start. Attention and sealing treat a band as one strided view.
    """

    heads: tuple[int, ...]
    kept: int
    offset: int


@dataclass(frozen=True)
class SlabLayout:
    """The layout of one slab.

    Args:
        kept: int64 [num_layers, num_heads], tokens that each head keeps of a sealed segment (n in the design).
        head_dim: elements per key and per value.
        segment: tokens per segment (S).
    """

    kept: np.ndarray
    head_dim: int
    segment: int

    def __post_init__(self) -> None:
        check_segment(self.segment)
        kept = np.ascontiguousarray(self.kept, dtype=np.int64)
        if kept.ndim != 2 or kept.size == 0:
            raise RaggedConfigError(f"kept counts must be [layers, heads], got shape {kept.shape}")
        if (kept % UNIT).any() or (kept < UNIT).any() or (kept > self.segment).any():
            raise RaggedConfigError(f"kept counts must be multiples of {UNIT} in [{UNIT}, {self.segment}]")
        kept.setflags(write=False)
        object.__setattr__(self, "kept", kept)

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
        for row in self.kept:
            offset, bands = 0, []
            for kept in sorted({int(n) for n in row}, reverse=True):
                heads = tuple(int(h) for h in np.flatnonzero(row == kept))
                bands.append(Band(heads=heads, kept=kept, offset=offset))
                offset += len(heads) * 2 * kept * self.head_dim
            layers.append(tuple(bands))
        return tuple(layers)

    @cached_property
    def layer_elems(self) -> np.ndarray:
        """int64 [num_layers]: elements of each layer's part of the slab."""
        return 2 * self.head_dim * self.kept.sum(axis=1)

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
                for place, head in enumerate(band.heads):
                    offsets[layer, head] = self.layer_start[layer] + band.offset + place * 2 * band.kept * self.head_dim
        return offsets

    @cached_property
    def value_offset(self) -> np.ndarray:
        """int64 [num_layers, num_heads]: first element of each head's values [kept, head_dim] in the slab."""
        return self.key_offset + self.kept * self.head_dim

    def slab_bytes(self, itemsize: int) -> int:
        """Bytes of one slab for a KV dtype of `itemsize` bytes."""
        return self.slab_elems * itemsize

    def tail_bytes(self, itemsize: int) -> int:
        """Bytes of one request's tail: an uncompressed segment of all layers and heads."""
        return self.num_layers * 2 * self.num_heads * self.segment * self.head_dim * itemsize

    def full_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in an uncompressed cache."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * itemsize

    @property
    def mean_kept_share(self) -> float:
        """Kept / full bytes of a sealed segment: the mean of n / S."""
        return float(self.kept.mean()) / self.segment

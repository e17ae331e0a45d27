"""Codec of slabs as 8-bit floating-point numbers with a scale for each head's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.features.host_tier.slab_codec import SlabCodec
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""Largest number, 448. Torch casts larger numbers to NaN, so values are clamped to it."""

SCALE_BYTES = torch.float32.itemsize

WIDE_BYTES = 64 << 20
"""Bytes of slabs, converted to float32, that are encoded at a time."""


class Fp8Codec(SlabCodec):
    """Elements as FP8 E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), scaled by their largest.

    Every (layer, head, K or V) of a slab has a float32 scale of its own, its largest magnitude / 448: keys differ by
    orders of magnitude between heads. An element x is stored as fp8(x / scale). Three bits of mantissa: the error is at
    most |x| / 16, or scale / 1024 where that is more (below scale / 64 numbers are evenly spaced).

    A row holds the layers in order, each as scales [heads, 2 (K, V)] and then its elements, heads in the slab's order:
    the bytes of a group of layers are contiguous.

    Finite numbers come back finite. An infinity is stored as the largest finite number, and NaN as zero.
    """

    name, exact = "fp8", False

    def __init__(self, layout: SlabLayout, dtype: torch.dtype) -> None:
        super().__init__(layout, dtype)
        self._layer_scales = 2 * layout.num_heads * SCALE_BYTES
        self._tables: dict[torch.device, _Parts] = {}

    @property
    def row_bytes(self) -> int:
        return self._layer_byte(self.layout.num_layers)

    def _layer_byte(self, layer: int) -> int:
        """Return the start of a layer's part of the row."""
        return layer * self._layer_scales + int(self.layout.layer_start[layer])

    def watch(self, store: SlabStore) -> None:
        # The transfer waits for the device, so it must not happen while requests run.
        self._parts(store.slabs.device)

    def _parts(self, device: torch.device) -> _Parts:
        if device not in self._tables:
            self._tables[device] = _Parts.for_layout(self.layout, device)
        return self._tables[device]

    def encode(self, slabs: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        at_once = max(1, WIDE_BYTES // (self.layout.slab_elems * torch.float32.itemsize))
        return torch.cat([self._encoded(some) for some in slabs.split(at_once)])

    def _encoded(self, slabs: torch.Tensor) -> torch.Tensor:
        parts, most = self._parts(slabs.device), torch.finfo(self.dtype).max
        values = slabs.float().nan_to_num(0.0, most, -most).unflatten(1, (-1, self.layout.head_dim))
        of_rows = values.abs().amax(dim=2)
        largest = of_rows.index_select(1, parts.rows.flatten()).unflatten(1, parts.rows.shape).amax(dim=2)
        # The scale of an all-zero part must not be zero, because elements are divided by it.
        scale = (largest / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        if parts.empty is not None:
            scale.masked_fill_(parts.empty, 0.0)
        values.div_(scale.index_select(1, parts.part_of_row)[..., None]).clamp_(-LARGEST, LARGEST)
        elements = values.to(FP8).flatten(1).view(torch.uint8)
        scales = scale.view(torch.uint8).split(self._layer_scales, dim=1)
        layers = elements.split(self.layout.layer_elems.tolist(), dim=1)
        return torch.cat([piece for both in zip(scales, layers, strict=True) for piece in both], dim=1)

    def decode(self, rows: torch.Tensor, first: int, end: int, device: torch.device) -> torch.Tensor:
        here = rows[:, self._layer_byte(first) : self._layer_byte(end)].to(device, non_blocking=True)
        lengths = [length for layer in range(first, end) for length in (self._layer_scales, self._layer_elems(layer))]
        pieces = here.split(lengths, dim=1)
        scale, elements = (torch.cat(pieces[kind::2], dim=1) for kind in range(2))
        most, dim = torch.finfo(self.dtype).max, self.layout.head_dim
        from_row, to_row = (int(self.layout.layer_start[layer]) // dim for layer in (first, end))
        part_of_row = self._parts(device).part_of_row[from_row:to_row] - 2 * self.layout.num_heads * first
        values = elements.view(FP8).float().unflatten(1, (-1, dim))
        values.mul_(scale.view(torch.float32).index_select(1, part_of_row)[..., None])
        # 448 times a rounded scale may be more than the largest number it was made of.
        return values.clamp_(-most, most).to(self.dtype).flatten(1)

    def _layer_elems(self, layer: int) -> int:
        return int(self.layout.layer_elems[layer])


@dataclass(frozen=True)
class _Parts:
    """Index tables of a slab's parts, which are the keys or the values of a head; a row has head_dim elements.

    rows: int64 [parts, most], the rows of each part, padded with the part's first row.
    part_of_row: int64 [rows].
    empty: bool [parts], True for parts without rows; None if every part has rows.
    """

    rows: torch.Tensor
    part_of_row: torch.Tensor
    empty: torch.Tensor | None

    @classmethod
    def for_layout(cls, layout: SlabLayout, device: torch.device) -> _Parts:
        counts = np.array([band.kept for bands in layout.bands for band in bands for _ in range(2 * len(band.heads))])
        firsts = np.cumsum(counts) - counts
        place = np.arange(counts.max())
        rows = firsts[:, None] + np.where(place < counts[:, None], place, 0)
        empty = counts == 0
        return cls(
            torch.from_numpy(np.where(empty[:, None], 0, rows)).to(device),
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device),
            torch.from_numpy(empty).to(device) if empty.any() else None,
        )

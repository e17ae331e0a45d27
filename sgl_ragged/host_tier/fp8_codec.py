"""Slabs as eight-bit floating-point numbers with a scale for each head's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sgl_ragged.host_tier.slab_codec import SlabCodec
from sgl_ragged.mem_pool.layout import Band, SlabLayout

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448. Torch's cast of what is larger gives NaN, so values are clamped to it."""

SCALE_BYTES = torch.float32.itemsize


class Fp8Codec(SlabCodec):
    """Elements as FP8 E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), scaled by their largest.

    Every (layer, head, K or V) of a slab has a float32 scale of its own, its largest magnitude / 448: keys differ by
    orders of magnitude between heads. An element x is stored as fp8(x / scale). Three bits of mantissa: the error is at
    most |x| / 16, or scale / 1024 where that is more (below scale / 64 numbers are evenly spaced).

    A row holds the layers in order, each as scales [heads, 2 (K, V)] and then its elements, heads in the slab's order:
    what a group of layers needs lies in one piece.

    Finite numbers come back finite. An infinity is stored as the largest finite number, and NaN as zero.
    """

    name, exact = "fp8", False

    def __init__(self, layout: SlabLayout, dtype: torch.dtype) -> None:
        super().__init__(layout, dtype)
        self._layer_scales = 2 * layout.num_heads * SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        return self._layer_byte(self.layout.num_layers)

    def _layer_byte(self, layer: int) -> int:
        """Where a layer's part of the row starts."""
        return layer * self._layer_scales + int(self.layout.layer_start[layer])

    def _bands(self, layer: int) -> Iterator[tuple[Band, int, slice]]:
        """Bands of a layer with the first of their scales and the place of their elements, both within the layer."""
        first = 0
        for band in self.layout.bands[layer]:
            elems = len(band.heads) * 2 * band.kept * self.layout.head_dim
            if elems:
                yield band, first, slice(band.offset, band.offset + elems)
            first += 2 * len(band.heads)

    def encode(self, slabs: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        most = torch.finfo(self.dtype).max
        rows = torch.zeros((len(slabs), self.row_bytes), dtype=torch.uint8, device=slabs.device)
        for layer in range(self.layout.num_layers):
            scales, elements = self._parts(rows[:, self._layer_byte(layer) : self._layer_byte(layer + 1)])
            start, stop = (int(one) for one in self.layout.layer_start[layer : layer + 2])
            here = slabs[:, start:stop]
            for band, first, place in self._bands(layer):
                count = 2 * len(band.heads)
                values = here[:, place].float().nan_to_num(0.0, most, -most).unflatten(1, (count, -1))
                largest = values.abs().amax(dim=2, keepdim=True)
                # Not zero where all are: nothing is divided by it.
                scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
                scales[:, first : first + count] = scale[..., 0]
                stored = (values / scale).clamp(-LARGEST, LARGEST).to(FP8)
                elements[:, place] = stored.flatten(1).view(torch.uint8)
        return rows

    def decode(self, rows: torch.Tensor, first: int, end: int, device: torch.device) -> torch.Tensor:
        from_byte, to_byte = self._layer_byte(first), self._layer_byte(end)
        here = rows[:, from_byte:to_byte].to(device, non_blocking=True)
        start, stop = (int(self.layout.layer_start[layer]) for layer in (first, end))
        slabs = torch.empty((len(rows), stop - start), dtype=self.dtype, device=device)
        most = torch.finfo(self.dtype).max
        for layer in range(first, end):
            byte, elem = self._layer_byte(layer) - from_byte, int(self.layout.layer_start[layer]) - start
            scales, elements = self._parts(here[:, byte : byte + self._layer_byte(layer + 1) - self._layer_byte(layer)])
            for band, number, place in self._bands(layer):
                count = 2 * len(band.heads)
                stored = elements[:, place].view(FP8).float().unflatten(1, (count, -1))
                # 448 times a rounded scale may be more than the largest number it was made of.
                values = (stored * scales[:, number : number + count, None]).clamp_(-most, most)
                slabs[:, elem + place.start : elem + place.stop] = values.flatten(1).to(self.dtype)
        return slabs

    def _parts(self, layers_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's part of rows: scales float32 [slabs, 2 heads], elements uint8 [slabs, elements]."""
        return layers_row[:, : self._layer_scales].view(torch.float32), layers_row[:, self._layer_scales :]

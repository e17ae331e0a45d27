"""How a slab lies in the host tier: the bytes of its row there, and the way back into the pool. Without SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sgl_ragged.layout import SlabLayout


class SlabCodec(ABC):
    """Writes slabs to rows of bytes, and reads layers of slabs back.

    Args:
        layout: of the slabs.
        dtype: of the slabs' elements.
    """

    name: str
    exact: bool
    """Whether what is read back is what was written, bit by bit."""

    def __init__(self, layout: SlabLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one slab in the tier."""

    @abstractmethod
    def encode(self, slabs: torch.Tensor) -> torch.Tensor:
        """uint8 [slabs, row_bytes] of slabs [slabs, slab_elems]; a view where that is possible."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Elements [slabs, elements] of layers first to end - 1, of rows uint8 [slabs, row_bytes]; maybe a view."""


class ExactCodec(SlabCodec):
    """The slab as it is."""

    name, exact = "exact", True

    @property
    def row_bytes(self) -> int:
        return self.layout.slab_bytes(self.dtype.itemsize)

    def encode(self, slabs: torch.Tensor) -> torch.Tensor:
        return slabs.view(torch.uint8)

    def decode(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        start, stop = (int(self.layout.layer_start[layer]) for layer in (first, end))
        return rows.view(self.dtype)[:, start:stop]


CODECS: dict[str, type[SlabCodec]] = {codec.name: codec for codec in (ExactCodec,)}
"""Values of --ragged-host-codec."""

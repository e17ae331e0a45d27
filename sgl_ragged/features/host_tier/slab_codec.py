"""Codecs of slabs in the host tier: bytes of a row, and the way back into the pool. Without SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_ragged.mem_pool.layout import SlabLayout

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.slab_store import SlabStore


class SlabCodec(ABC):
    """Codec that writes slabs to rows of bytes, and reads layers of slabs back.

    Args:
        layout: layout of the slabs.
        dtype: dtype of the slabs' elements; uint8 if they are codes.
    """

    name: str
    exact: bool
    """True if decoded slabs have the same bits as the encoded slabs."""

    def __init__(self, layout: SlabLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one slab in the tier, a multiple of the bytes of an element."""

    def watch(self, store: SlabStore) -> None:
        """Listen to the store's seals, if the codec needs them; called once, before the first seal."""
        return

    @abstractmethod
    def encode(self, slabs: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Return rows uint8 [slabs, row_bytes] of slabs [slabs, slab_elems]; a view if possible.

        Args:
            slots: slots of the slabs in the watched store.
        """

    @abstractmethod
    def decode(self, rows: torch.Tensor, first: int, end: int, device: torch.device) -> torch.Tensor:
        """Return elements [slabs, elements] of layers first to end - 1, on the device, or a view of the rows.

        Args:
            rows: uint8 [slabs, row_bytes], on the host.
            device: device of the store, on which a computing codec decodes; only bytes that it reads are copied there.
        """


class ExactCodec(SlabCodec):
    """Codec that stores slabs unchanged."""

    name, exact = "exact", True

    @property
    def row_bytes(self) -> int:
        return self.layout.slab_bytes(self.dtype.itemsize)

    def encode(self, slabs: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        return slabs.view(torch.uint8)

    def decode(self, rows: torch.Tensor, first: int, end: int, device: torch.device) -> torch.Tensor:
        start, stop = (int(self.layout.layer_start[layer]) for layer in (first, end))
        return rows.view(self.dtype)[:, start:stop]

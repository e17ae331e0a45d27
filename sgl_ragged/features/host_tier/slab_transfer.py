"""Copies of slabs between the pool and rows of the host tier. Without SGLang."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from sgl_ragged.attention.transfer import RowCopy
from sgl_ragged.features.host_tier.slab_codec import SlabCodec
from sgl_ragged.mem_pool.layout import SlabLayout

LAYER_GROUPS = 4
"""Copies per slab on its way back. Attention of a layer waits for its group; more groups overlap more, and cost a
copy per slab each: with one per layer, 512 slabs of 32 layers would be 16,384 copies."""

ENCODED_AT_ONCE = 16
"""Most slabs that a computing codec is given at once, which bounds its memory."""


def layer_groups(layout: SlabLayout, groups: int = LAYER_GROUPS) -> tuple[tuple[int, int], ...]:
    """Return [first, end) layers of groups with about equally many bytes."""
    borders = np.searchsorted(layout.layer_start, np.linspace(0, layout.slab_elems, groups + 1)[1:-1])
    edges = sorted({0, *np.clip(borders, 1, layout.num_layers).tolist(), layout.num_layers})
    return tuple(itertools.pairwise(edges))


class SlabTransfer:
    """Copies between slabs and rows of the host tier.

    Args:
        codec: writes slabs to rows.
        rows: uint8 [pages, codec.row_bytes] on the host, pinned if the slabs are on a GPU.
        row_copy: copies many rows in one launch, for slabs on a GPU; None to copy slab by slab.
    """

    def __init__(self, codec: SlabCodec, rows: torch.Tensor, row_copy: RowCopy | None = None) -> None:
        self.codec = codec
        self.rows = rows
        self.groups = layer_groups(codec.layout)
        self._row_copy = row_copy if codec.exact else None
        self._itemsize = codec.dtype.itemsize
        self._pairs: list[tuple[int, int]] = []

    @property
    def indexed_on_device(self) -> bool:
        """True if slots and pages must be on the device of the slabs, else on the host."""
        return self._row_copy is not None

    def back_up(self, slabs: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Write slabs [slots of the pool, slab_elems] to rows; slots and pages are integers [slabs]."""
        if self._row_copy is not None:
            self._row_copy(slabs, self.rows, slots, pages, (0, self.codec.row_bytes), 0)
            return
        pairs = _pairs(slots, pages)
        if self.codec.exact:
            for slot, page in pairs:
                self.rows[page].copy_(self.codec.encode(slabs[slot : slot + 1], [slot])[0], non_blocking=True)
            return
        for first in range(0, len(pairs), ENCODED_AT_ONCE):
            some = pairs[first : first + ENCODED_AT_ONCE]
            taken = [slot for slot, _ in some]
            encoded = self.codec.encode(torch.cat([slabs[slot : slot + 1] for slot in taken]), taken)
            for row, (_, page) in zip(encoded, some, strict=True):
                self.rows[page].copy_(row, non_blocking=True)

    def restore(self, slabs: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, layer: int) -> None:
        """Read a layer's part of rows back into slabs; call it for all layers in order.

        Whole groups of layers are read at the first of them.
        """
        start = self.codec.layout.layer_start
        if self._row_copy is not None:
            start_byte, end_byte = (int(start[one]) * self._itemsize for one in (layer, layer + 1))
            # Indices that SGLang passes are on this device, so these calls copy nothing.
            pages, slots = pages.to(slabs.device), slots.to(slabs.device)
            self._row_copy(self.rows, slabs, pages, slots, (start_byte, end_byte), start_byte)
            return
        if layer == 0:
            # Reading indices from the device waits for it, so they are read once for all layers.
            self._pairs = _pairs(slots, pages)
        group = next((one for one in self.groups if one[0] == layer), None)
        if group is None:
            return
        first, end = (int(start[one]) for one in group)
        for slot, page in self._pairs:
            found = self.codec.decode(self.rows[page : page + 1], *group, slabs.device)
            slabs[slot, first:end].copy_(found[0], non_blocking=True)


def _pairs(slots: torch.Tensor, pages: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(slots.tolist(), pages.tolist(), strict=True))

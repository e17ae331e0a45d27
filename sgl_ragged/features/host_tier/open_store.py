"""Open segments that left the device, in host pages as large as the pool's pages. Without SGLang.

An open segment is uncompressed, and its pages are copied without the codec of slabs. Copies are deferred until the next
batch is described, like copies on the device, so that a page is read before another request writes to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable

import torch

from sgl_ragged.attention.transfer import RowCopy
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.open_cache import Entry, OpenCache
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.transfer import sent

OPEN_SHARE = 1 / 8
"""Share of the host's bytes for open segments. At ratio 0.3 a conversation of 2,048 tokens has 18 % of its pages in its
open segment, a conversation of 8,192 tokens 5 %."""


def open_host_pages(rows: int, row_bytes: int, page_bytes: int, most: int) -> tuple[int, int]:
    """Divide the host's bytes between slabs and open segments.

    Args:
        rows: number of rows of slabs in all of the host's bytes.
        row_bytes: bytes of a row.
        page_bytes: bytes of a page of the pool.
        most: pages of a full open segment.

    Returns:
        Number of rows of slabs, and of pages of open segments; 0 pages if a full open segment would not fit.
    """
    pages = int(rows * row_bytes * OPEN_SHARE) // page_bytes
    return (rows - -(-pages * page_bytes // row_bytes), pages) if pages >= most else (rows, 0)


class OpenStore:
    """Store of open segments on the host; evicts entries that were used longest ago.

    Args:
        store: store whose pages are copied, and that runs deferred copies.
        pages: uint8 [pages, bytes of a page of the pool] on the host, pinned if that is on a GPU.
        row_copy: copies many rows in one launch, for pages on a GPU; None to copy page by page.
    """

    def __init__(self, store: SlabStore, pages: torch.Tensor, row_copy: RowCopy | None = None) -> None:
        self._store, self._pages, self._row_copy = store, pages, row_copy
        self._entries = OpenCache()
        self.clear()

    def clear(self) -> None:
        """Remove all entries and free their pages."""
        self._entries.clear()
        self._free = list(range(len(self._pages)))

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def page_bytes(self) -> int:
        return self._pages.shape[1]

    @property
    def pages_in_use(self) -> int:
        return self._entries.num_pages

    def find(self, prefix: int, name: Hashable, tokens: array, end: int) -> tuple[Entry, int] | None:
        """Find an entry as `OpenCache.find` does; its pages are host pages."""
        return self._entries.find(prefix, name, tokens, end)

    def keep(self, entry: Entry, spared: Collection[Entry] = ()) -> None:
        """Copy an entry of the device, whose pages may be reused once the next batch is described.

        If the host has no room, other entries are evicted, except those in `spared`; if that is not enough, the entry
        is not copied.
        """
        if self._entries.holds(entry.key, entry.tokens):
            return
        needed = len(entry.pages) - len(self._free)
        if needed > 0:
            for one in self._entries.oldest(needed, spared):
                self._entries.remove(one)
                self._free += one.pages.tolist()
        if len(entry.pages) > len(self._free):
            return
        taken, self._free = self._free[: len(entry.pages)], self._free[len(entry.pages) :]
        pages = torch.tensor(taken, dtype=torch.int64)
        for one in self._entries.put(entry.key, entry.tokens, pages, spared):
            self._free += one.pages.tolist()
        self._store.defer(lambda: self._back_up(entry.pages, pages))

    def restore(self, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy host pages to pages of the pool, int64 [n] each, when the next batch is described."""
        self._store.defer(lambda: self._restore(pages, slots))

    def _back_up(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        slabs = self._store.slabs
        if self._row_copy is not None:
            self._row_copy(slabs, self._pages, slots, sent(pages, slabs.device), (0, self.page_bytes), 0)
            return
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            self._pages[page].copy_(movable(slabs)[slot].view(torch.uint8), non_blocking=True)

    def _restore(self, pages: torch.Tensor, slots: torch.Tensor) -> None:
        slabs = self._store.slabs
        if self._row_copy is not None:
            self._row_copy(self._pages, slabs, sent(pages, slabs.device), slots, (0, self.page_bytes), 0)
            return
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            movable(slabs)[slot].view(torch.uint8).copy_(self._pages[page], non_blocking=True)

"""Pages of a request that go to another pool, or to host memory while the request waits. Without SGLang."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.open_segments import OpenSegments


@dataclass(frozen=True)
class Buffer:
    """Memory of a pool's pages: address of the first byte, bytes of all pages, and bytes of one page."""

    address: int
    num_bytes: int
    page_bytes: int


class RequestPages:
    """Pages of the requests of one pool.

    Slabs and open segments are stored in pages of one buffer, so pages alone describe a request to another pool: one
    per segment, which SGLang has in its table, then the extra pages of the open segment.
    """

    def __init__(self, open_segments: OpenSegments) -> None:
        self._open_segments = open_segments
        self._store = open_segments.store

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return self._open_segments.pages.segment

    @property
    def buffer(self) -> Buffer:
        slabs = self._store.slabs
        return Buffer(slabs.data_ptr(), slabs.nbytes, slabs[0].nbytes)

    def num_extra(self, tokens: int) -> int:
        """Return the pages of a sequence of `tokens` tokens in addition to one per segment."""
        return self._open_segments.pages.extra(tokens % self.segment)

    def extra(self, row: int, tokens: int) -> torch.Tensor:
        """Return the extra pages, int64 [num_extra], of the request in a row of SGLang's table with `tokens` tokens."""
        return self._open_segments.extra_pages(row, tokens % self.segment)

    def num_bytes(self, tokens: int) -> int:
        """Return the bytes of all pages of a sequence of `tokens` tokens."""
        return self._open_segments.pages.pages(tokens) * self.buffer.page_bytes

    @property
    def unsealed(self) -> bool:
        """True if seals are pending."""
        return self._store.has_pending_seals

    def flush_seals(self) -> None:
        """Run pending seals and deferred copies, which may read or write pages that have been freed since.

        Call it before another pool reads or writes pages.
        """
        self._store.flush_pending_seals()

    def copy_to_host(self, slots: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        """Copy the pages of a request to host memory; return [pages, elements of a slab].

        Args:
            slots: integers [segments], slots of the request's first `tokens` tokens.
            row: the request's row of SGLang's table.
        """
        if tokens % self.segment == 0:
            # The last segment is full and may not be sealed yet. A segment that a running step fills beyond `tokens`
            # must stay open, because the results of that step are dropped.
            self.flush_seals()
        return movable(self._store.slabs)[self._all(slots, row, tokens)].cpu()

    def copy_from_host(self, pages: torch.Tensor, slots: torch.Tensor, row: int, tokens: int) -> None:
        """Write a copy that `copy_to_host` made to the request's present pages."""
        self.flush_seals()
        slabs = movable(self._store.slabs)
        slabs[self._all(slots, row, tokens)] = pages.to(slabs.device)

    def _all(self, slots: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        return torch.cat([slots.long(), self.extra(row, tokens)])

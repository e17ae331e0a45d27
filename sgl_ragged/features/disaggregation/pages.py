"""Pages of a request that go to another pool, or to host memory while the request waits. Without SGLang."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.open_segments import OpenSegments


@dataclass(frozen=True)
class Buffer:
    """Where the pages of a pool are: an address, and bytes, all of them and those of one."""

    address: int
    num_bytes: int
    page_bytes: int


class RequestPages:
    """The pages of requests of one pool.

    Slabs and open segments lie in pages of the same memory, and all that their tokens need lies in these. So what
    another pool must get of a request are pages: one for each of its segments, which SGLang knows, and behind them the
    extra ones of its open segment.
    """

    def __init__(self, open_segments: OpenSegments) -> None:
        self._open_segments = open_segments
        self._store = open_segments.store

    @property
    def segment(self) -> int:
        """Tokens of one."""
        return self._open_segments.pages.segment

    @property
    def buffer(self) -> Buffer:
        slabs = self._store.slabs
        return Buffer(slabs.data_ptr(), slabs.nbytes, slabs[0].nbytes)

    def num_extra(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens has beside one for each segment."""
        return self._open_segments.pages.extra(tokens % self.segment)

    def extra(self, row: int, tokens: int) -> torch.Tensor:
        """int64 [num_extra]: those of the request in this row of SGLang's table, with so many tokens."""
        return self._open_segments.extra_pages(row, tokens % self.segment)

    def num_bytes(self, tokens: int) -> int:
        """Bytes of all pages of a sequence of so many tokens."""
        return self._open_segments.pages.pages(tokens) * self.buffer.page_bytes

    @property
    def unsealed(self) -> bool:
        """True if there are seals for `settle` to do."""
        return self._store.has_pending_seals

    def settle(self) -> None:
        """Before pages are read by others, or handed to others who will write to them: seal what is pending and copy
        what was deferred, since both may be about pages that have been given back meanwhile."""
        self._store.flush_pending_seals()

    def copy_to_host(self, slots: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        """A copy of the pages of a request in host memory: [pages, elements of a slab].

        Args:
            slots: integers [segments], of its first `tokens` tokens.
        """
        if tokens % self.segment == 0:
            # Its last segment is full, and may not be a slab yet. One that a step on its way has filled beyond these
            # tokens must stay open: what that step computes is dropped.
            self.settle()
        return movable(self._store.slabs)[self._all(slots, row, tokens)].cpu()

    def copy_from_host(self, pages: torch.Tensor, slots: torch.Tensor, row: int, tokens: int) -> None:
        """Write such a copy to the pages that the request has now."""
        self.settle()
        slabs = movable(self._store.slabs)
        slabs[self._all(slots, row, tokens)] = pages.to(slabs.device)

    def _all(self, slots: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        return torch.cat([slots.long(), self.extra(row, tokens)])

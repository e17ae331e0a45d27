"""Pages of open segments with chains of drafts, and the end of such segments. Without SGLang.

How much of a chain is accepted is known late: where batches overlap, pages for the next chain are allocated while this
one is computed. So pages are put aside for whatever may be accepted, and are given to the open segment when the next
chain begins. Whether the segment before it has ended is known then, too, and it is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_ragged.mem_pool.transfer import sent, to_device

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.open_segments import OpenSegments

Seal = Callable[[torch.Tensor, Sequence[int]], None]
"""Told of rows, integers [requests] on the device, and of their tokens: those that end a segment have it sealed."""


class OpenChains:
    """Pages of open segments with chains. A chain ends at a segment border, so it fills at most one segment.

    width: tokens of a chain. ahead: how many tokens more than SGLang says a request may have when its next chain
    begins: `width` where batches overlap, else 0.
    """

    def __init__(self, open_segments: OpenSegments, width: int, seal: Seal, ahead: int = 0) -> None:
        self.width, self.ahead = width, ahead
        self._open, self._seal = open_segments, seal
        table = open_segments.store.tails.table
        self._aside = torch.zeros((len(table), open_segments.pages.most), dtype=torch.int64, device=table.device)
        self.clear()

    def clear(self) -> None:
        """Forget everything: all pages are free."""
        self._spare: dict[int, int] = {}
        self._number: dict[int, int] = {}

    @property
    def spare(self) -> int:
        """Pages that are set aside."""
        return sum(self._spare.values())

    def most_pages(self) -> int:
        """Return the most pages that a request needs in addition to one per segment."""
        return self._open.pages.most + self._of_chain(0)

    def demand(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Return the pages to set aside for requests in `rows`, which have `lengths` tokens as far as SGLang knows.

        Whether a chain that comes to its segment's border fills it is known once its tokens are accepted: it has the
        stage by then. Tokens after the border need no page, since they are computed again when that segment is sealed.
        """
        return sum(map(self._demand, rows, lengths))

    def reserve(self, rows: Sequence[int], lengths: Sequence[int], pages: torch.Tensor) -> None:
        """Set `pages`, int64 [demand], aside."""
        cells = list[tuple[int, int]]()
        for row, length in zip(rows, lengths, strict=True):
            has, more = self._spare.get(row, 0), self._demand(row, length)
            cells += [(row, place) for place in range(has, has + more)]
            self._spare[row] = has + more
            self._number.setdefault(row, length // self._open.pages.segment)
        if cells:
            self._aside[self._to_device(cells)] = pages

    def begin(self, rows: torch.Tensor, rows_cpu: Sequence[int], lengths: Sequence[int]) -> None:
        """Chains begin behind `lengths` tokens of requests, which all count: what they end is sealed, and their open
        segments get pages of those put aside. rows: integers [requests], on the device.

        Of requests that have ended while the batch was prepared, the results are not needed.
        """
        segment = self._open.pages.segment
        gone = [row for row in rows_cpu if row not in self._number]
        if gone:
            self._open.give_none(gone)
        running = [(row, length) for row, length in zip(rows_cpu, lengths, strict=True) if row in self._number]
        ended = {row for row, length in running if length // segment > self._number[row]}
        if ended:
            self._end(rows, rows_cpu, [n if row in ended else 0 for row, n in zip(rows_cpu, lengths, strict=True)])
        cells, counts = list[tuple[int, int]](), list[int]()
        for row, length in running:
            more = max(self._of_chain(length % segment) - self._open.held_by(row), 0)
            left = self._spare.get(row, 0) - more
            assert left >= 0, f"row {row} has no pages for a chain behind {length} tokens"
            cells += [(row, place) for place in range(left, left + more)]
            counts.append(more)
            self._spare[row] = left
        if cells:
            self._open.more([row for row, _ in running], counts, self._aside[self._to_device(cells)])

    def settle(self, row: int, tokens: int) -> None:
        """Seal the last segment of an ended request if its `tokens` tokens fill it, with no chain after it."""
        number = self._number.get(row)
        if number is None or tokens // self._open.pages.segment <= number:
            return
        border = (number + 1) * self._open.pages.segment
        self._end(sent(torch.tensor([row]), self._aside.device), [row], [border])

    def is_sealed(self, row: int, tokens: int) -> bool:
        """True if the segment in which a request's first `tokens` tokens end is a slab, or about to be: tokens that
        count no more have filled it."""
        return self._number.get(row, 0) > tokens // self._open.pages.segment

    def may_end(self, tokens: int) -> bool:
        """Return True if the running step may fill the open segment of a request with `tokens` tokens."""
        return tokens % self._open.pages.segment + self.ahead >= self._open.pages.segment

    def release(self, row: int) -> torch.Tensor:
        """Return pages that were set aside for a request that ends, int64; the caller owns them."""
        self._number.pop(row, None)
        return self._aside[row, : self._spare.pop(row, 0)].clone()

    def _end(self, rows: torch.Tensor, rows_cpu: Sequence[int], lengths: Sequence[int]) -> None:
        """Commit open segments that requests have filled; requests with 0 tokens have filled none."""
        self._seal(rows, lengths)
        full = {row: length for row, length in zip(rows_cpu, lengths, strict=True) if length}
        self._open.commit(list(full), list(full.values()))
        self._number.update((row, length // self._open.pages.segment) for row, length in full.items())

    def _demand(self, row: int, length: int) -> int:
        """Return the most tokens that the running chain can add before the border."""
        number, place = divmod(length, self._open.pages.segment)
        last = place + self.ahead
        # What has ended already keeps its pages until they are read no more.
        held = self._open.held_by(row) if self._number.get(row, number) == number else 0
        needed = self._of_chain(min(last, self._open.pages.segment - 1)) - held
        if last >= self._open.pages.segment:
            needed = max(needed, self._of_chain(0))
        return max(needed - self._spare.get(row, 0), 0)

    def _of_chain(self, place: int) -> int:
        """Return the extra pages of an open segment with a chain at this place."""
        pages, stop = self._open.pages, place + self.width
        return pages.most if stop >= pages.segment else pages.extra(stop)

    def _to_device(self, cells: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        columns = to_device([*np.array(cells, np.int32).T], self._aside.device)
        return tuple(column.long() for column in columns)

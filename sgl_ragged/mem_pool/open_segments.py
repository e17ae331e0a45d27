"""Pages of open segments: their number is known on the host, their indices on the device. Without SGLang.

Pages are handed out batch by batch, before the batch is described, and go back when the segment is sealed. They are
read until then: a batch that finishes a segment leaves its pages to the next batch, which may write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_ragged.mem_pool.open_cache import OpenCache
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import BEFORE, NOW, Tails
from sgl_ragged.mem_pool.transfer import sent, to_device

Cell = tuple[int, int, int]
"""Row, which, and place in `Tails.table`."""


@dataclass
class _Changes:
    """Changes of a batch: cells that get pages, rows whose segment is finished, cells whose pages go back after it."""

    first: list[Cell] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    then: list[Cell] = field(default_factory=list)
    retired: list[Cell] = field(default_factory=list)


class OpenSegments:
    """Pages of all open segments of a pool.

    `store` has the tails, whose table is written, and counts the batches that have been described. `kept`: those of
    requests that have ended, where the radix cache keeps any. `chains`: of drafts, where requests have any. `on_copy`:
    who has tokens of their own at the same locations; they are told of the page where an open segment begins and of
    that where its copy does, int64 [1] each, when it is copied.
    """

    def __init__(self, store: SlabStore) -> None:
        self.store, self.kept = store, OpenCache()
        self.chains: OpenChains | None = None
        self.on_copy: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
        self.reset()

    @property
    def _tails(self) -> Tails:
        return self.store.tails

    def reset(self) -> None:
        """Forget everything: all pages are free."""
        self.store.forget_copies()
        self.kept.clear()
        self._held: dict[int, int] = {}
        if self.chains is not None:
            self.chains.clear()
        self._retired: list[tuple[int, torch.Tensor]] = []

    @property
    def pages(self) -> OpenPages:
        return self._tails.open_pages

    @property
    def held(self) -> int:
        """Pages that requests have in addition to one per segment."""
        return sum(self._held.values())

    @property
    def returning(self) -> int:
        """Number of pages that no batch will read again."""
        return sum(len(pages) for batch, pages in self._retired if batch < self.store.batches)

    @property
    def of_requests(self) -> int:
        """Pages that running requests have in addition to one page per segment."""
        return self.held + (self.chains.spare if self.chains is not None else 0)

    @property
    def in_use(self) -> int:
        """Pages that are neither free nor for one segment each."""
        return self.of_requests + sum(len(pages) for _, pages in self._retired) - self.returning

    def take_back(self) -> list[torch.Tensor]:
        """Return pages that no batch will read again, int64 each; the caller owns them."""
        now = self.store.batches
        back = [pages for batch, pages in self._retired if batch < now]
        self._retired = [(batch, pages) for batch, pages in self._retired if batch >= now]
        return back

    def extend_demand(self, prefixes: Sequence[int], ends: Sequence[int]) -> int:
        """Return the pages that chunks from `prefixes` to `ends` need in addition to one per new segment."""
        return sum(map(self._extend_demand, prefixes, ends))

    def decode_demand(self, lengths: Sequence[int]) -> int:
        """Return the pages for one new token each, with which requests have `lengths` tokens."""
        return sum(map(self._decode_demand, lengths))

    def _extend_demand(self, prefix: int, end: int) -> int:
        segment, extra = self.pages.segment, self.pages.extra
        (before, was), (behind, rest) = divmod(prefix, segment), divmod(end, segment)
        if before == behind or was == 0:
            return extra(rest) - extra(was)
        # What is finished is full first, and has its stage.
        return extra(segment) - extra(was) + 1 + extra(rest)

    def _decode_demand(self, length: int) -> int:
        place = (length - 1) % self.pages.segment
        return (place > 0 and place % self.pages.tokens == 0) + (length % self.pages.segment == 0)

    def extend(self, rows: Sequence[int], prefixes: Sequence[int], ends: Sequence[int], pages: torch.Tensor) -> None:
        """Hand out `pages`, int64 [extend_demand], to chunks of requests with these rows."""
        changes, (segment, extra, stage) = _Changes(), (self.pages.segment, self.pages.extra, self.pages.most - 1)
        for row, prefix, end in zip(rows, prefixes, ends, strict=True):
            (before, was), (behind, rest) = divmod(prefix, segment), divmod(end, segment)
            has = self._held.get(row, 0)
            if before < behind:
                changes.finished.append(row)
                if was:
                    changes.then += [(row, BEFORE, place) for place in range(has, stage + 1)]
                    changes.retired += [(row, BEFORE, place) for place in range(stage + 1)]
                has = 0
            changes.then += [(row, NOW, place) for place in range(has, extra(rest))]
            self._hold(row, extra(rest))
        self._write(changes, pages)

    def decode(self, rows: Sequence[int], lengths: Sequence[int], pages: torch.Tensor) -> None:
        """Hand out `pages`, int64 [decode_demand], to requests that have `lengths` tokens with their next one."""
        changes, stage = _Changes(), self.pages.most - 1
        for row, length in zip(rows, lengths, strict=True):
            place = (length - 1) % self.pages.segment
            if place > 0 and place % self.pages.tokens == 0:
                changes.first.append((row, NOW, place // self.pages.tokens - 1))
                self._hold(row, place // self.pages.tokens)
            if length % self.pages.segment == 0:
                # Decode amid prefill is described as a chunk, which looks for what it finishes there.
                changes.finished.append(row)
                changes.then.append((row, BEFORE, stage))
                changes.retired += [(row, BEFORE, held) for held in (*range(self._held.get(row, 0)), stage)]
                self._hold(row, 0)
        self._write(changes, pages)

    def held_by(self, row: int) -> int:
        """Return the extra pages of a request's open segment."""
        return self._held.get(row, 0)

    def more(self, rows: Sequence[int], counts: Sequence[int], pages: torch.Tensor) -> None:
        """Hand out `pages`, int64 [sum of counts], to open segments of requests after the pages they have."""
        changes = _Changes()
        for row, count in zip(rows, counts, strict=True):
            held = self._held.get(row, 0)
            changes.then += [(row, NOW, place) for place in range(held, held + count)]
            self._hold(row, held + count)
        self._write(changes, pages)

    def give_none(self, rows: Sequence[int]) -> None:
        """Direct writes after the first page of these requests' open segments to the padding page."""
        (which,) = to_device([np.array(rows, np.int32)], self._tails.table.device)
        self._tails.table[which.long(), NOW] = 0

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Chains have filled segments of requests, which have `lengths` tokens. Their pages go back when these are
        sealed."""
        changes = _Changes()
        for row, length in zip(rows, lengths, strict=True):
            assert length % self.pages.segment == 0, (row, length)
            assert self._held[row] == self.pages.most, "a segment ends with the chain that comes to its border"
            changes.finished.append(row)
            changes.retired += [(row, BEFORE, place) for place in range(self.pages.most)]
            self._hold(row, 0)
        # The batch that wrote to them has been described, as that of a step of decode has not when it ends a segment.
        self._write(changes, self._tails.table.new_empty(0, dtype=torch.int64), self.store.batches - 1)

    @property
    def reusable(self) -> int:
        """Tokens of an open segment whose pages hold all that is needed of them."""
        return self._tails.reusable

    def extra_pages(self, row: int, tokens: int) -> torch.Tensor:
        """Return the extra pages, int64, of the first `tokens` tokens of a request's open segment, which keeps them."""
        return self._tails.table[row, NOW, : self.pages.extra(tokens)].long()

    def give_up(self, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the extra pages of the first `tokens` tokens, and the remaining ones; the caller owns all of them."""
        pages = self._tails.table[row, NOW, : self._held.pop(row, 0)].long()
        return pages[: self.pages.extra(tokens)], pages[self.pages.extra(tokens) :]

    def adopt(self, row: int, pages: torch.Tensor) -> None:
        """Give a new request the extra pages, int64, of the open segment that it continues."""
        if len(pages):
            self._tails.table[row, NOW, : len(pages)] = pages.to(torch.int32)
            self._hold(row, len(pages))

    def release(self, row: int) -> torch.Tensor:
        """Take the pages of a request that ends, int64; the caller owns them."""
        pages = self._tails.table[row, NOW, : self._held.pop(row, 0)].long()
        return pages if self.chains is None else torch.cat([pages, self.chains.release(row)])

    def _hold(self, row: int, count: int) -> None:
        if count:
            self._held[row] = count
        else:
            self._held.pop(row, None)

    def _write(self, changes: _Changes, pages: torch.Tensor, batches: int | None = None) -> None:
        """Write changes to the table; `batches`: number of the last batch that writes to pages that go back."""
        if not (changes.first or changes.finished or changes.then):
            return
        table = self._tails.table
        cells = [np.array(part, np.int32).reshape(-1, 3).T for part in (changes.first, changes.then, changes.retired)]
        host = [column for part in cells for column in part]
        columns = [column.long() for column in to_device([*host, np.array(changes.finished, np.int32)], table.device)]
        first, then, retired, finished = columns[:3], columns[3:6], columns[6:9], columns[9]
        table[tuple(first)] = pages[: len(changes.first)].to(torch.int32)
        table[finished, BEFORE] = table[finished, NOW]
        table[tuple(then)] = pages[len(changes.first) :].to(torch.int32)
        if changes.retired:
            # A stage of decode is read as that of the segment that is open now.
            table[finished, NOW, -1] = table[finished, BEFORE, -1]
            batches = self.store.batches if batches is None else batches
            self._retired.append((batches, table[tuple(retired)].long()))


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

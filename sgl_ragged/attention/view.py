"""Views: the segments, slots and tokens that each query sees. No other code turns positions into these.

Slots are those of `SegmentTable`. A slot holds a sealed
segment; the tokens after the last sealed segment are open: they are in the request's tail. Kernels and torch code take
views and know nothing of positions. A view's lists of slots may leave segments out, and may differ between the pieces
of one chunk.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.mem_pool.segments import InTails, SegmentTable
from sgl_ragged.mem_pool.tails import NOW, Tails
from sgl_ragged.mem_pool.transfer import sent, to_device

Seen = Callable[[int, int], Sequence[int] | None]
"""By index of the request and number of the segment: which earlier segments its queries see; None for all."""


@dataclass(frozen=True)
class DecodeView:
    """View of one query per request, padding included. All tensors are on one device.

    req_pool_indices: int64 [batch], rows of SGLang's table. pages: int32 [batch, K], of the open segments
        (`Tails.pages`).
    open_offsets: int32 [batch], where the new token goes in its segment.
    open_lengths: int32 [batch], tokens of the open segment with the new one; 0 for padding of no length.
    slots: int32 [batch, most], slots of the sealed segments that each query sees, in position order.
    seen: int32 [batch], how many of them count.
    """

    req_pool_indices: torch.Tensor
    pages: torch.Tensor
    open_offsets: torch.Tensor
    open_lengths: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor

    def __len__(self) -> int:
        return len(self.req_pool_indices)

    def __getitem__(self, requests: slice) -> DecodeView:
        """Return the view of a part of the requests; shares memory."""
        return DecodeView(*(getattr(self, name)[requests] for name in self.__dataclass_fields__))

    @classmethod
    def empty(cls, batch: int, most: int, tails: Tails) -> DecodeView:
        """Allocate buffers for `decode_view`: zeros, which are padding."""
        device = tails.table.device
        req_pool_indices = torch.zeros(batch, dtype=torch.int64, device=device)
        open_offsets, open_lengths, seen = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        pages, slots = (
            torch.zeros((batch, width), dtype=torch.int32, device=device) for width in (tails.open_pages.most, most)
        )
        return cls(req_pool_indices, pages, open_offsets, open_lengths, slots, seen)


def decode_view(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tails: Tails,
    out: DecodeView,
    in_view: torch.Tensor | None = None,
) -> DecodeView:
    """Describe a decode batch in the first rows of `out`. Does not wait for the device.

    Args:
        req_to_token: int32 [rows, context], SGLang's table.
        rows: integers [batch], its rows.
        lengths: integers [batch], tokens of each request with the new one; 0 or 1 for padding.
        in_view: int32 [rows, limit], `Histories.table`: which segments the requests see. None for all.
    """
    view, segment = out[: len(rows)], tails.segment
    table = SegmentTable(req_to_token, segment)
    view.req_pool_indices.copy_(rows)
    view.open_offsets.copy_(lengths)
    view.open_offsets.sub_(1).clamp_min_(0)
    torch.div(view.open_offsets, segment, rounding_mode="floor", out=view.seen)
    view.pages.copy_(tails.pages(view.req_pool_indices, table.slots(view.req_pool_indices, view.seen), NOW))
    view.open_offsets.remainder_(segment)
    view.open_lengths.copy_(lengths)
    torch.minimum(view.open_lengths, view.open_offsets + 1, out=view.open_lengths)
    if in_view is None:
        slots = table.first_slots(view.req_pool_indices, view.slots.shape[1])
    else:
        view.seen.clamp_max_(in_view.shape[1])
        numbers = in_view[:, : view.slots.shape[1]].index_select(0, view.req_pool_indices)
        slots = table.slots(view.req_pool_indices[:, None], numbers)
    view.slots[:, : slots.shape[1]].copy_(slots)
    return view


def most_seen(lengths: torch.Tensor, segment: int, in_view: torch.Tensor | None = None) -> int:
    """Return the most segments that a request of the batch sees; lengths are on the host and count the new token."""
    return int(seen_segments(lengths.max()[None], segment, in_view)[0])


def seen_segments(lengths: torch.Tensor, segment: int, in_view: torch.Tensor | None = None) -> np.ndarray:
    """Return the sealed segments that each request of a decode batch sees, int64 [batch]; see `most_seen`."""
    sealed = np.maximum(lengths.numpy() - 1, 0) // segment
    return sealed if in_view is None else np.minimum(sealed, in_view.shape[1])


def filled(req_to_token: torch.Tensor, rows: torch.Tensor, lengths: Sequence[int], tails: Tails) -> InTails | None:
    """Return the segments that a decode step fills, if any. Does not wait for the device.

    Args:
        rows: integers [batch], on the device. lengths: tokens of each request with the new one, on the host.
    """
    segment = tails.segment
    full = [index for index, length in enumerate(lengths) if length > 0 and length % segment == 0]
    if not full:
        return None
    which, numbers = sent(torch.tensor([full, [lengths[i] // segment - 1 for i in full]]), req_to_token.device)
    own = rows[which].to(torch.int64)
    slots = SegmentTable(req_to_token, segment).slots(own, numbers).to(torch.int64)
    return InTails(own, tails.pages(own, tails.stages(own, NOW), NOW), slots, numbers)


@dataclass(frozen=True)
class Piece:
    """Tokens of a chunk in one segment, whose queries see equal sealed segments.

    request: its index in the batch. segment_index: the segment's, in its sequence.
    first_token: index in the batch of the first token. tokens: how many there are.
    offset: place of the first token in the segment, which is the number of its tokens in the tail already.
    finished: whether the chunk ends the segment.
    listed: which of the view's lists the queries see. seen: how many slots of it.
    """

    request: int
    segment_index: int
    first_token: int
    tokens: int
    offset: int
    finished: bool
    listed: int
    seen: int


TILE_COLUMNS = ("request", "first_token", "tokens", "first_row", "seen", "open_length", "listed")
"""Columns of `ExtendView.tiles`: index of the request; first token, in the batch, of the piece; tokens in it; first of
the piece's rows in this tile; slots that it sees; tokens of its segment that are in the tail; its list of slots."""


@dataclass(frozen=True)
class ExtendView:
    """View of chunks of several requests. Tokens are numbered through the batch, requests in batch order.

    req_pool_indices: int64 [requests], rows of SGLang's table.
    pages: int32 [requests, most], slots of each request's segments, those included that its chunk finishes or leaves
        open.
    lists: int32 [lists, most], slots that pieces see; a piece's `seen` says how many of its list count.
    prefixes, lengths: tokens before each chunk and in it.
    uncertain: whether these are tokens that may yet be rejected (`chain_view`): segments that they end stay open.
    """

    req_pool_indices: torch.Tensor
    pages: torch.Tensor
    lists: torch.Tensor
    pieces: tuple[Piece, ...]
    prefixes: tuple[int, ...]
    lengths: tuple[int, ...]
    segment: int
    uncertain: bool = False

    @property
    def most_seen(self) -> int:
        return max((piece.seen for piece in self.pieces), default=0)

    @functools.cached_property
    def open_copies(self) -> np.ndarray:
        """Tokens of segments that their tails hold already, int32 [copies, 3] of (token, request, offset).

        They are written before anything is sealed.
        """
        return _copies([piece for piece in self.pieces if piece.offset])

    @functools.cached_property
    def rest_copies(self) -> np.ndarray:
        """Tokens of segments that are open afterwards, like `open_copies`; written once tails are read."""
        return _copies([piece for piece in self.pieces if not piece.offset and not piece.finished])

    @functools.cached_property
    def open_segments(self) -> np.ndarray:
        """Indices of the segments that are open before and after each chunk, int32 [2, requests]."""
        before = np.array(self.prefixes, np.int32)
        behind = before if self.uncertain else before + np.array(self.lengths, np.int32)
        return np.stack([before, behind]) // self.segment

    def begun(self, tokens: int) -> list[tuple[int, int]]:
        """Pages that the chunks are the first to write to, as (request, index among its open segment's pages).

        tokens: of an open segment that a page holds.
        """
        found = []
        for request, (prefix, length) in enumerate(zip(self.prefixes, self.lengths, strict=True)):
            same = self.uncertain or prefix // self.segment == (prefix + length) // self.segment
            first = prefix % self.segment if same else 0
            last = first + length if same else (prefix + length) % self.segment
            found += [(request, index) for index in range(-(-first // tokens), -(-last // tokens))]
        return found

    @functools.cached_property
    def tail_seals(self) -> np.ndarray:
        """Finished segments in tails, after `open_copies`, int32 [segments, 2] of (request, segment index)."""
        found = [(p.request, p.segment_index) for p in self.pieces if p.finished and p.offset]
        return np.array(found, np.int32).reshape(-1, 2)

    @functools.cached_property
    def chunk_seals(self) -> np.ndarray:
        """Finished segments inside chunks, int32 [segments, 3] of (request, segment index, first token)."""
        found = [(p.request, p.segment_index, p.first_token) for p in self.pieces if p.finished and not p.offset]
        return np.array(found, np.int32).reshape(-1, 3)

    @functools.cached_property
    def chunk_runs(self) -> list[slice]:
        """Runs of `chunk_seals` that are adjacent."""
        found = self.chunk_seals[:, 2]
        borders = [0, *(np.flatnonzero(np.diff(found) != self.segment) + 1).tolist(), len(found)]
        return [slice(start, stop) for start, stop in itertools.pairwise(borders) if stop > start]

    def tiles(self, q_per_kv: int, block_m: int) -> np.ndarray:
        """Tiles, int32 [tiles, len(TILE_COLUMNS)], those with the longest history first.

        A tile has `block_m` rows, pairs of a token and a query head.
        """
        found = [
            (p.request, p.first_token, p.tokens, row, p.seen, p.offset, p.listed)
            for p in self.pieces
            for row in range(0, p.tokens * q_per_kv, block_m)
        ]
        found.sort(key=lambda tile: -tile[4])
        return np.array(found, np.int32).reshape(-1, len(TILE_COLUMNS))


def extend_view(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    prefixes: Sequence[int],
    lengths: Sequence[int],
    segment: int,
    seen: Seen | None = None,
) -> ExtendView:
    """Describe chunks of `lengths` tokens that follow `prefixes` tokens of their requests.

    Args:
        req_to_token, rows: as in `decode_view`.
        seen: which of the segments before it a piece sees; None for all of them.
    """
    starts = itertools.accumulate(lengths[:-1], initial=0)
    return _view(req_to_token, rows, prefixes, lengths, starts, segment, seen)


def chain_view(
    req_to_token: torch.Tensor, rows: torch.Tensor, prefixes: Sequence[int], width: int, segment: int
) -> ExtendView:
    """Describe chains of `width` tokens, which may yet be rejected, after `prefixes` tokens of their requests.

    A chain ends at the border of the open segment: tokens after it see that segment sealed, whose tokens may not be
    accepted yet. Tokens of a batch after a border are in no piece: they are neither stored nor attend.

    Args:
        req_to_token, rows: as in `decode_view`.
    """
    lengths = [min(width, segment - prefix % segment) for prefix in prefixes]
    starts = range(0, width * len(prefixes), width)
    return _view(req_to_token, rows, prefixes, lengths, starts, segment, uncertain=True)


def _view(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    prefixes: Sequence[int],
    lengths: Sequence[int],
    starts: Iterable[int],
    segment: int,
    seen: Seen | None = None,
    uncertain: bool = False,
) -> ExtendView:
    """Return pieces of chunks; starts: number of each request's first token in the batch."""
    pieces: list[Piece] = []
    own_lists: list[tuple[int, Sequence[int]]] = []
    for request, (prefix, length, start) in enumerate(zip(prefixes, lengths, starts, strict=True)):
        stop = prefix + length
        for number in range(prefix // segment, -(-stop // segment)):
            begin, end = max(number * segment, prefix), min((number + 1) * segment, stop)
            if begin < end:
                numbers = seen(request, number) if seen is not None else None
                if numbers is not None:
                    own_lists.append((request, numbers))
                pieces.append(
                    Piece(
                        request=request,
                        segment_index=number,
                        first_token=start + begin - prefix,
                        tokens=end - begin,
                        offset=begin % segment,
                        finished=not uncertain and end == (number + 1) * segment,
                        listed=request if numbers is None else len(rows) + len(own_lists) - 1,
                        seen=number if numbers is None else len(numbers),
                    )
                )
    most = max((-(-(p + n) // segment) for p, n in zip(prefixes, lengths, strict=True)), default=0)
    rows = rows.to(torch.int64)
    pages = SegmentTable(req_to_token, segment).first_slots(rows, most)
    lists = torch.cat([pages, _lists(pages, own_lists)]) if own_lists else pages
    return ExtendView(rows, pages, lists, tuple(pieces), tuple(prefixes), tuple(lengths), segment, uncertain)


def _lists(pages: torch.Tensor, wanted: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """Return the slots of a request's segments, int32 [wanted, most], padded with any slot."""
    requests = np.array([request for request, _ in wanted], np.int32)
    numbers = np.zeros((len(wanted), pages.shape[1]), np.int32)
    for line, (_, own) in zip(numbers, wanted, strict=True):
        line[: len(own)] = own
    on_device, requests_on_device = to_device([numbers, requests], pages.device)
    return pages[requests_on_device[:, None].long(), on_device.long()]


def _copies(pieces: list[Piece]) -> np.ndarray:
    parts = [np.empty((0, 3), np.int32)]
    for piece in pieces:
        count = np.arange(piece.tokens, dtype=np.int32)
        parts.append(np.stack([piece.first_token + count, np.full_like(count, piece.request), piece.offset + count], 1))
    return np.concatenate(parts)

"""Bounded histories of all running requests, by row of SGLang's request table.

Segments that leave a view are chosen on the host, before the next segment is opened. The choice uses scores of segments
that were sealed at least one segment earlier: in decode they are sent to the host when a segment begins and used when
the next segment begins, so no step waits for them. Decode reads `table` on the device; only changed rows are written,
one small transfer for each filled segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_ragged.attention.view import Seen
from sgl_ragged.features.history.bound import BoundedHistory, HistoryBound
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.mem_pool.segments import SegmentTable
from sgl_ragged.mem_pool.transfer import sent

OverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Function that sums float32 [n] over ranks and returns equal numbers on all of them."""


@dataclass(frozen=True)
class _Arriving:
    """Scores that are being copied to the host; complete once event `sent` has happened, or if it is None."""

    history: BoundedHistory
    segment_indices: list[int]
    scores: torch.Tensor
    sent: torch.cuda.Event | None


class Histories:
    """Views of running requests on their histories.

    Args:
        req_to_token: int32 [rows, context], SGLang's request table.
        segment: tokens of a segment.
        scores: of segments in the store; None if segments leave by age.
        over_ranks: combines scores of tensor-parallel ranks, whose decisions must be the same.

    `table` is int32 [rows, columns], the segments that each row's decode steps see, ascending; the first
    min(sealed segments, `limit`) entries of a row are valid. `dropped` counts segments that have left views.
    """

    def __init__(
        self,
        bound: HistoryBound,
        req_to_token: torch.Tensor,
        segment: int,
        scores: SegmentScores | None = None,
        over_ranks: OverRanks = lambda scores: scores,
    ) -> None:
        assert (scores is None) == bound.by_age
        self.bound = bound
        self.dropped = 0
        self._slots, self._segment = SegmentTable(req_to_token, segment), segment
        self.scores, self._over_ranks = scores, over_ranks
        columns = min(bound.limit, self._slots.most_segments)
        self._all = torch.arange(columns, dtype=torch.int32)
        self.table = self._all.to(req_to_token.device).repeat(self._slots.num_rows, 1)
        self._histories: dict[int, BoundedHistory] = {}
        self._changed: set[int] = set()
        self._arriving: list[_Arriving] = []

    gauges: ClassVar[dict[str, str]] = {}
    counters: ClassVar = {"dropped_segments": "Segments that have left the views of requests with bounded histories."}
    label: ClassVar = ""

    def readings(self) -> Mapping[tuple[str, str], float]:
        """Return metric values by name and label."""
        return {("dropped_segments", ""): self.dropped}

    @property
    def limit(self) -> int:
        """Most segments that a request sees."""
        return self.bound.limit

    def get(self, row: int) -> BoundedHistory | None:
        """Return the history of the request in a row; None while it sees all of its segments."""
        return self._histories.get(row)

    @property
    def returned(self) -> int:
        """Number of segments whose pages running requests have given back."""
        return sum(len(history.returned) for history in self._histories.values())

    def forget(self, row: int) -> None:
        """Forget a row's request, which has ended or was retracted."""
        if self._histories.pop(row, None) is not None:
            self._changed.add(row)

    def advance(self, row: int, sealed: int) -> BoundedHistory | None:
        """Return the history of a row's request with `sealed` segments; None while it sees all of them."""
        history = self._histories.get(row)
        if sealed < self.bound.limit and history is None:
            return None
        if history is None:
            # No segment has left yet, so the history starts with the first segment.
            history = self._histories[row] = BoundedHistory(self.bound)
        if sealed > history.sealed:
            self._collect_scores(row, history, sealed)
            before = len(history.left)
            history.advance(sealed)
            self.dropped += len(history.left) - before
            self._changed.add(row)
        return history

    def seen(self, req_pool_indices: Sequence[int], prefixes: Sequence[int], lengths: Sequence[int]) -> Seen | None:
        """Return the segments that queries of chunks see; None if all see everything. Advances the histories.

        Args:
            req_pool_indices: rows of the requests. prefixes, lengths: tokens before each chunk and in it; a chunk has
                at most `bound.latest` segments, unless segments leave by age.
        """
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for request, (row, prefix, length) in enumerate(zip(req_pool_indices, prefixes, lengths, strict=True)):
            for number in range(prefix // self._segment, -(-(prefix + length) // self._segment)):
                history = self.advance(row, number)
                if history is not None and history.left:
                    found[request, number] = tuple(history.in_view)
        return (lambda request, number: found.get((request, number))) if found else None

    def refresh(self) -> None:
        """Send changes to the device, and start copies of scores that the next decisions need.

        Call it before a decode step is described, after all full segments have been sealed. Does not wait for the
        device.
        """
        if not self._changed:
            return
        req_pool_indices = sorted(self._changed)
        self._changed = set()
        lines = []
        for row in req_pool_indices:
            history = self._histories.get(row)
            line = self._all.clone()
            if history is not None:
                line[: len(history.in_view)] = torch.tensor(history.in_view, dtype=torch.int32)
                self._request_scores(row, history)
            lines.append(line)
        changed = sent(torch.tensor(req_pool_indices), self.table.device)
        self.table[changed] = sent(torch.stack(lines), self.table.device)

    def _request_scores(self, row: int, history: BoundedHistory) -> None:
        segment_indices = history.unscored(history.sealed + 1)
        if not segment_indices:
            return
        scores = self._gather(row, segment_indices)
        if scores.is_cuda:
            host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            host.copy_(scores, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
            self._arriving.append(_Arriving(history, segment_indices, host, sent))
        else:
            history.learn(segment_indices, scores.tolist())

    def _collect_scores(self, row: int, history: BoundedHistory, sealed: int) -> None:
        """Collect the scores that the history needs to advance: take finished copies, and wait for missing scores."""
        arriving, self._arriving = self._arriving, []
        for one in arriving:
            if one.sent is not None:
                one.sent.synchronize()
            one.history.learn(one.segment_indices, one.scores.tolist())
        segment_indices = history.unscored(sealed)
        if segment_indices:
            if self.table.is_cuda:
                # They may have been sealed on another stream.
                torch.cuda.synchronize(self.table.device)
            history.learn(segment_indices, self._gather(row, segment_indices).tolist())

    def _gather(self, row: int, segment_indices: list[int]) -> torch.Tensor:
        """Return scores of segments of a row's request, float32 [segments], equal on all ranks."""
        assert self.scores is not None
        on_device = sent(torch.tensor(segment_indices), self.table.device)
        slots = self._slots.slots(row, on_device)
        return self._over_ranks(self.scores.of(slots.long()))

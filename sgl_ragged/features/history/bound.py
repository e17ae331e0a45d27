"""The bound of a request's history: the segments that it sees, and the memory that it can take. No torch.

PagedEviction (Algorithms 1 and 3) drops a block of the cache whenever one fills up. Here blocks are sealed segments:
once more than `limit` are in view, the segment with the lowest score leaves the view for good. The score is fixed when
a segment is sealed, so the view at a position depends only on the tokens before it, and not on cache hits, retractions
or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import PoolSizes

LEAST_SEGMENTS = 3
"""Smallest bound: the first segment, the latest, and one that is chosen by score."""

RECENCY = "recency"
"""Score by which the oldest segment leaves: StreamingLLM in blocks, a sink and a window."""

NOVELTY = "value_novelty"
"""Score of a segment by its least typical tokens; needs the mean values that calibration records."""

AUTO = "auto"
"""NOVELTY if the profile has mean values, else RECENCY."""

SCORE_NAMES = (AUTO, NOVELTY, "value_key_norm", RECENCY)
"""Values of --ragged-history-score. The formulas are in `segment_scores`, which needs torch."""


RADIX_CACHE = "ragged_bounded"
"""Name of the radix cache in SGLang's registry."""


@dataclass(frozen=True)
class HistoryBound:
    """Bound of a request's history.

    limit: most sealed segments that a query sees.
    score: name of the score by which segments leave, one of SCORE_NAMES.
    lag: most of the latest sealed segments that a request holds for sliding-window layers even if they have left.
    """

    limit: int
    score: str
    lag: int = 0

    @property
    def latest(self) -> int:
        """Number of latest segments that never leave.

        A chunk of prefill of at most this length needs no scores of its own segments to find the view of its queries.
        """
        return max(1, self.limit // 2)

    @property
    def held(self) -> int:
        """Most unshared segments of a decoding request: its view, the open segment, and segments within the lag."""
        return self.limit + 1 + max(self.lag - self.latest, 0)

    @property
    def by_age(self) -> bool:
        return self.score == RECENCY

    def request_bytes(self, sizes: PoolSizes) -> int:
        """Return the most unshared bytes of a decoding request: slabs, pages of the open segment, and windows."""
        windows = (self.lag + 1) * sizes.side_page_bytes
        return (self.held + sizes.open_pages.most) * sizes.slab_bytes + sizes.row_bytes + windows

    def describe(self, sizes: PoolSizes) -> str:
        """Return the part of the start-up line."""
        return (
            f"requests see {self.limit * sizes.layout.segment} tokens of their histories and hold at most "
            f"{self.request_bytes(sizes)} bytes in addition to shared pages"
        )

    def growth(self, shared: int, own: int, extend: int, new: int, segment: int) -> int:
        """Return the most tokens that a request can still come to hold in addition to those it holds.

        A request holds all segments that it shares through the radix tree, even if they have left its view. It holds
        `held` segments of its own and, in prefill, the segments of the chunk. Until the first segment leaves, prefill
        hands segments over to the tree.

        Args:
            shared, own: segments that the request holds in the tree and outside of it.
            extend, new: tokens that remain to be prefilled and to be generated.
            segment: tokens of a segment.
        """
        prompt = shared + own + -(-extend // segment)
        handed_over = max(min(self.limit, prompt) - shared, 0) if extend else 0
        chunk = self.latest if extend and prompt > self.limit else 0
        most = handed_over + self.held + chunk
        return min(extend + new, max(most - own, 0) * segment)


def check_score(name: str) -> None:
    """Raise RaggedConfigError for a name that is not in SCORE_NAMES."""
    if name not in SCORE_NAMES:
        raise RaggedConfigError(f"unknown --ragged-history-score {name!r}; known: {', '.join(SCORE_NAMES)}")


def history_bound(tokens: int | None, score: str, segment: int) -> HistoryBound | None:
    """Return the bound for --ragged-history. Raises RaggedConfigError for an impossible number of tokens."""
    if tokens is None:
        return None
    if tokens % segment or tokens < LEAST_SEGMENTS * segment:
        nearest = max(round(tokens / segment), LEAST_SEGMENTS) * segment
        raise RaggedConfigError(
            f"--ragged-history {tokens} must be a multiple of the segment length {segment}, and at least "
            f"{LEAST_SEGMENTS} segments: the first, the latest and one that is chosen; try {nearest}"
        )
    return HistoryBound(tokens // segment, score)


class BoundedHistory:
    """The segments that one request sees, numbered from 0.

    sealed: number of sealed segments.
    in_view: indices of the segments that the request sees, ascending.
    left: indices of the segments that have left the view.
    returned: members of `left` whose pages the request has freed.
    """

    def __init__(self, bound: HistoryBound) -> None:
        self.bound = bound
        self.sealed = 0
        self.in_view: list[int] = []
        self.left: set[int] = set()
        self.returned: set[int] = set()
        self._scores: dict[int, float] = {}

    def unscored(self, sealed: int) -> list[int]:
        """Return the segments whose scores `advance(sealed)` may need and that are not known yet."""
        if self.bound.by_age or sealed <= self.bound.limit:
            return []
        segment_indices = [*self.in_view, *range(self.sealed, sealed)]
        old = sealed - self.bound.latest
        return [index for index in segment_indices if 0 < index < old and index not in self._scores]

    def learn(self, segment_indices: Sequence[int], scores: Sequence[float]) -> None:
        """Record scores of segments. Changes the state."""
        self._scores.update(zip(segment_indices, scores, strict=True))

    def advance(self, sealed: int) -> None:
        """Seal segments until there are `sealed`; for each one above the bound a segment leaves. Changes the state.

        Every score of `unscored(sealed)` must be known.
        """
        for number in range(self.sealed, sealed):
            self.in_view.append(number)
            if len(self.in_view) > self.bound.limit:
                leaving = min(self.in_view[1 : -self.bound.latest], key=self._rank)
                self.in_view.remove(leaving)
                self.left.add(leaving)
                self._scores.pop(leaving, None)
        self.sealed = max(self.sealed, sealed)

    def _rank(self, number: int) -> tuple[float, int]:
        return (0.0 if self.bound.by_age else self._scores[number], number)

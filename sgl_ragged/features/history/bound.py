"""The bound of a request's history: the segments that it sees, and the memory that it can take. No torch.

PagedEviction (Algorithms 1 and 3) drops a block of the cache whenever one fills up. Here blocks are sealed segments:
once more than `limit` are in view, the one with the lowest score leaves it for ever. The score is fixed when a segment
is sealed, so what is in view at a position follows from the tokens before it, whatever was cached, retracted or
batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import PoolSizes

LEAST_SEGMENTS = 3
"""The first, the latest, and one that is chosen."""

RECENCY = "recency"
"""The score by which the oldest leaves: StreamingLLM in blocks, a sink and a window."""

NOVELTY = "value_novelty"
"""The score of segments by what in them is unlike the rest; needs the means of values that calibration records."""

AUTO = "auto"
"""NOVELTY where there are such means, else RECENCY."""

SCORE_NAMES = (AUTO, NOVELTY, "value_key_norm", RECENCY)
"""Values of --ragged-history-score. The formulas are in `segment_scores`, which needs torch."""


RADIX_CACHE = "ragged_bounded"
"""Name of the radix cache in SGLang's registry."""


@dataclass(frozen=True)
class HistoryBound:
    """limit: sealed segments that a query sees at most. score: by which they leave (SCORE_NAMES).

    lag: how many of the latest sealed segments a request holds whether it sees them or not, at most: those that
        sliding-window layers still need.
    """

    limit: int
    score: str
    lag: int = 0

    @property
    def latest(self) -> int:
        """Number of latest segments that never leave.

        A chunk of prefill that is no longer than that needs no score of its own segments to know what its queries see.
        """
        return max(1, self.limit // 2)

    @property
    def held(self) -> int:
        """Segments of its own that a request holds at most while it decodes: what it sees, the open one, and what has
        left its view within the lag."""
        return self.limit + 1 + max(self.lag - self.latest, 0)

    @property
    def by_age(self) -> bool:
        return self.score == RECENCY

    def request_bytes(self, sizes: PoolSizes) -> int:
        """Bytes that a request holds of its own at most while it decodes: slabs of what it sees and of its open
        segment, that one's other pages, and what sliding-window layers need."""
        windows = (self.lag + 1) * sizes.side_page_bytes
        return (self.held + sizes.open_pages.most) * sizes.slab_bytes + sizes.row_bytes + windows

    def describe(self, sizes: PoolSizes) -> str:
        """Return the part of the start-up line."""
        return (
            f"requests see {self.limit * sizes.layout.segment} tokens of their histories and hold at most "
            f"{self.request_bytes(sizes)} bytes beside what they share"
        )

    def growth(self, shared: int, own: int, extend: int, new: int, segment: int) -> int:
        """Return the most tokens that a request can still come to hold in addition to those it holds.

        It holds the segments that it shares through the radix tree whether it sees them or not; of its own, `held` and,
        in prefill, those of the chunk. While nothing has left the view, prefill hands segments over to the tree.

        Args:
            shared, own: segments that it holds of the tree's and of its own.
            extend, new: tokens that it has still to prefill and to generate. segment: tokens of one.
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

    sealed: how many have been sealed. in_view: indices, ascending. left: those that have left. returned: those of them
    whose pages the request has given back.
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
        """Seal segments until there are `sealed`; one leaves for each that is too many. Changes the state.

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

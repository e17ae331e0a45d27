"""Sizes of the pool of sliding-window layers. Plain arithmetic.

A page holds the windowed layers' keys and values of one segment, uncompressed. A running request holds the pages of its
window and of the chunk that is prefilled; a cached prefix can be used only if the pages of the window before its end
are in the cache. So both pools must grow together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry

TOKENS_PER_WINDOW = 16384
"""Tokens of cached history per kept window. A pool of conversations of this length finds all their windows; longer
ones leave windows unused, and some of the shorter ones are computed again."""

MAX_RUNNING_SHARE = 1 / 4
"""Without --max-running-requests, windows of running requests take at most this share of the KV bytes."""


DECODE_PAGES = 2
"""Pages of a running request in addition to its window: the one that decode fills, and one that is freed once all of it
has left the window."""


def window_pages(window: int, interval: int, segment: int) -> int:
    """Return the most pages of windowed layers that a request holds while it decodes, the one it fills included.

    Args:
        window: tokens that a query sees. interval: tokens that leave the window before SGLang frees any page of them.
    """
    return -(-(window + interval) // segment) + DECODE_PAGES


@dataclass(frozen=True)
class WindowNeeds:
    """Needs of sliding-window layers, in pages of one segment on one rank.

    page_bytes: bytes of a page.
    per_prefix: pages that hold the window before the end of a cached prefix.
    per_request: pages of a running request, at most.
    in_flight: pages of one chunk of prefill and of the window before it.
    share: pages per slab (--swa-full-tokens-ratio); None for the rule of `pages`.
    """

    what: ClassVar[str] = "sliding-window layers"

    page_bytes: int
    per_prefix: int
    per_request: int
    in_flight: int
    share: float | None = None

    def pages(self, num_slots: int, requests: int, segment: int) -> int:
        """Return the pages for `num_slots` slabs, padding included; at most one per slab.

        Args:
            requests: number of running requests whose windows must fit.
            segment: tokens of a segment.
        """
        slabs = max(num_slots - 1, 0)
        if self.share is not None:
            return 1 + int(self.share * slabs)
        cached = -(-slabs * segment * self.per_prefix // TOKENS_PER_WINDOW)
        return 1 + min(slabs, self.in_flight + requests * self.per_request + cached)

    def running(self, requests: int, budget_bytes: int) -> int:
        """Return the number of running requests whose windows are counted if the user gave no number."""
        most = int(budget_bytes * MAX_RUNNING_SHARE) // (self.per_request * self.page_bytes)
        return max(1, min(requests, most))

    def require(self, pages: int, num_slots: int) -> None:
        """Raise RaggedConfigError for a pool in which no request can be admitted.

        Args:
            pages: with the padding page, as `pages` gives them.
        """
        # A chunk is never larger than what the slabs hold.
        needed = 1 + max(self.per_request, min(self.in_flight + self.per_request, num_slots - 1))
        if pages < needed:
            raise RaggedConfigError(
                f"the sliding-window layers get {pages - 1} pages, and one request needs {needed - 1}: up to "
                f"{self.in_flight} for a chunk of prefill and {self.per_request} for its window; give more memory, a "
                f"higher --swa-full-tokens-ratio or a lower --chunked-prefill-size"
            )


def eviction_interval() -> int:
    """Return the tokens that leave the windows of a request before SGLang frees pages of them."""
    from sglang.srt.environ import envs

    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def window_needs(
    geometry: ModelGeometry,
    *,
    ranks: int,
    itemsize: int,
    segment: int,
    chunk: int,
    share: float | None,
    interval: int,
    bounded: bool,
) -> WindowNeeds:
    """Return the needs of the model's sliding-window layers on one rank.

    Args:
        itemsize: bytes per element of the KV dtype.
        chunk: tokens of a chunk of prefill, at most.
        share: --swa-full-tokens-ratio, if it was given.
        interval: tokens that leave a request's windows before SGLang frees pages of them.
        bounded: True where histories are bounded.
    """
    windowed = geometry.windowed
    assert windowed is not None, "the feature has joined"
    # With more ranks than heads, every rank has a head of its own.
    elements = windowed.elements_per_token // min(ranks, geometry.num_heads)
    per_prefix = -(-windowed.window // segment)
    # After its bound a prompt waits for its next chunk with its window outside the tree, where it cannot be evicted.
    waiting = per_prefix if bounded else 0
    return WindowNeeds(
        page_bytes=elements * itemsize * segment,
        per_prefix=per_prefix,
        per_request=window_pages(windowed.window, interval, segment),
        in_flight=-(-chunk // segment) + 1 + waiting,
        share=share,
    )

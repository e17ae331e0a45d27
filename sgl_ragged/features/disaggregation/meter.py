"""Requests, tokens and bytes that were sent, counted on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sgl_ragged.mem_pool.sizing import PoolSizes

TOKENS = (256, 1024, 4096, 16384)
"""Prompt lengths in tokens for which operators see the bytes that are sent."""


def sent_bytes(sizes: PoolSizes) -> dict[int, dict[str, int]]:
    """Return the bytes that are sent for prompts of TOKENS lengths: by this pool, and by the token pool.

    Bytes of pages are a mean over all positions of the prompt's end in its last segment.
    """
    segment, token_bytes = sizes.layout.segment, sizes.layout.full_bytes_per_token(sizes.itemsize)
    found = {}
    for tokens in TOKENS:
        lengths = range(max(tokens - segment // 2, 1), max(tokens - segment // 2, 1) + segment)
        pages = sum(map(sizes.open_pages.pages, lengths)) * sizes.slab_bytes // segment
        found[tokens] = {"pages": pages, "token_pool": sum(lengths) * token_bytes // segment}
    return found


class SendMeter:
    """Requests, tokens and bytes that a prefill server has handed to its transfer engine.

    Args:
        page_bytes: bytes of one page.
    """

    gauges: ClassVar[Mapping[str, str]] = {}
    counters: ClassVar[Mapping[str, str]] = {
        "sent_requests": "Requests whose pages have been handed to the transfer engine.",
        "sent_tokens": "Tokens of requests whose pages have been handed to the transfer engine.",
        "sent_bytes": "Bytes of the pages that have been handed to the transfer engine on this rank.",
    }
    label: ClassVar[str] = ""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._counts = dict.fromkeys(self.counters, 0)

    def count(self, pages: int, requests: int = 0, tokens: int = 0) -> None:
        """Count pages that were handed over; `requests` and `tokens` of those that are complete with them."""
        self._counts["sent_bytes"] += pages * self._page_bytes
        self._counts["sent_requests"] += requests
        self._counts["sent_tokens"] += tokens

    def readings(self) -> Mapping[tuple[str, str], float]:
        return {(name, ""): float(count) for name, count in self._counts.items()}

"""What the scheduler has promised to the batch that it puts together, until the batch has its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sgl_ragged.mem_pool.open_cache import Entry


@dataclass
class PendingBatch:
    """One batch of prefill or decode between its first request and its allocation.

    found: entries of the open-segment cache that its requests were promised; they are evicted last.
    locations: by request id, int64 token locations in the open segment that the request goes on with.
    open_pages: int64 pages that the allocation has set aside for open segments.
    decode_demand: number of these pages that a decode step needs, once it is known.
    """

    found: set[Entry] = field(default_factory=set)
    locations: dict[str, torch.Tensor] = field(default_factory=dict)
    open_pages: torch.Tensor | None = None
    decode_demand: int | None = None

    def set_aside(self, pages: torch.Tensor) -> None:
        """Keep pages for the open segments of the batch; the ones before must have been taken."""
        assert self.open_pages is None, "pages were set aside, and no hook took them"
        self.open_pages = pages

    def take_open_pages(self) -> torch.Tensor | None:
        """Return the pages that were set aside, and forget them."""
        pages, self.open_pages = self.open_pages, None
        return pages

"""Divide a KV budget in bytes into pages, which hold slabs and open segments, request rows and side pages. Plain
arithmetic."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, replace
from typing import Protocol

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages

MAX_ROW_SHARE = 1 / 8
"""Unless the user wants more running requests, their rows take at most this share of the KV bytes,
and at most half of what compression frees."""

TYPICAL_TOKENS = (1024, 8192)
"""Lengths of requests for which the start-up line gives the number that the pool holds at once."""

LOADS_TOKENS = (256, 1024, 4096, 16384)
"""Lengths of requests in `sgl-ragged layout`."""

MAX_ROWS = 2048
"""SGLang's own default number of request rows."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """Parse '24GiB', '512M', '1e9', '1048576' as bytes; suffixes k M G T decimal, Ki Mi Gi Ti binary, optional B."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _SUFFIXES:
        raise RaggedConfigError(f"cannot read {text!r} as a number of bytes; write for example 24GiB, 512M or 1048576")
    try:
        size = int(float(match.group(1)) * _SUFFIXES[match.group(2)])
    except (ValueError, OverflowError):
        raise RaggedConfigError(
            f"cannot read {text!r} as a number of bytes; write for example 24GiB, 512M or 1048576"
        ) from None
    if size <= 0:
        raise RaggedConfigError(f"{text!r} must be more than zero bytes")
    return size


class SidePages(Protocol):
    """Pages of a second pool that grows with the slabs (`windows.sizes.WindowNeeds`). what: their owner, in words."""

    @property
    def what(self) -> str: ...

    @property
    def page_bytes(self) -> int: ...

    def pages(self, num_slots: int, requests: int, segment: int) -> int:
        """Return the pages for `num_slots` slabs and `requests` running requests, padding included."""
        ...

    def running(self, requests: int, budget_bytes: int) -> int:
        """Return the requests whose pages are counted if the user gave no number."""
        ...

    def require(self, pages: int, num_slots: int) -> None:
        """Raise RaggedConfigError for too few pages to admit a request."""
        ...


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of the pool on one rank. Bytes are of this rank; tokens are virtual (uncompressed) tokens.

    `open_pages`: geometry of open segments. `side_bytes`: bytes per request row of the scorer and of features.
    `side_pages`, `side_page_bytes`: another pool's, its padding page among them. `side_pages_of`: whose they are.
    `beside_bytes`: bytes per page of features, which an uncompressed cache would have, too.
    """

    layout: SlabLayout
    itemsize: int
    open_pages: OpenPages
    num_slots: int
    num_rows: int
    side_bytes: int = 0
    side_pages: int = 0
    side_page_bytes: int = 0
    side_pages_of: str = ""
    beside_bytes: int = 0

    @property
    def slab_bytes(self) -> int:
        return self.layout.slab_bytes(self.itemsize)

    @property
    def page_bytes(self) -> int:
        """Bytes of a slab and of features' data per page."""
        return self.slab_bytes + self.beside_bytes

    @property
    def full_page_bytes(self) -> int:
        """Bytes of a page of an uncompressed cache, with the same data of features."""
        return self.layout.segment * self.layout.full_bytes_per_token(self.itemsize) + self.beside_bytes

    @property
    def freed_share(self) -> float:
        """Share of an uncompressed page's bytes that compression frees."""
        return 1 - self.page_bytes / self.full_page_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one request outside of its pages: their table, and `side_bytes`."""
        return 2 * self.open_pages.most * 4 + self.side_bytes

    @property
    def rows_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def side_pages_bytes(self) -> int:
        return self.side_pages * self.side_page_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.page_bytes + self.rows_bytes + self.side_pages_bytes

    @property
    def max_total_tokens(self) -> int:
        """Tokens that SGLang may allocate: slot 0 is its padding page and holds none."""
        return (self.num_slots - 1) * self.layout.segment

    @property
    def max_requests(self) -> int:
        """Requests that can run at once: row 0 is SGLang's padding row."""
        return self.num_rows - 1

    @property
    def full_tokens(self) -> int:
        """Tokens that an uncompressed cache holds in the same bytes, with equal side pages."""
        return (self.total_bytes - self.side_pages_bytes) * self.layout.segment // self.full_page_bytes

    @property
    def warning(self) -> str | None:
        """Why the pool holds fewer tokens than an uncompressed cache would, by more than the padding page, and what to
        do; None if it does not."""
        if self.max_total_tokens + self.layout.segment >= self.full_tokens:
            return None
        loss = (
            f"the ragged KV pool holds {self.max_total_tokens} tokens, an uncompressed cache would hold "
            f"{self.full_tokens} in the same {self.total_bytes} bytes"
        )
        if self.layout.byte_share(self.itemsize) >= 1:
            return f"{loss}: at ratio 1 nothing is compressed; lower --ragged-ratio"
        return (
            f"{loss}: the rows of {self.max_requests} requests take {self.rows_bytes} of them; lower "
            f"--max-running-requests, take another scorer, or give more memory"
        )

    def requests_of(self, tokens: int) -> tuple[int, int]:
        """How many requests of about so many tokens the pool holds at once, and how many an uncompressed cache would
        in its bytes. Of each, the mean over a segment's worth of lengths."""
        segment = self.layout.segment
        first = max(tokens - segment // 2, 1)
        pages = sum(self.open_pages.pages(first + n) for n in range(segment)) / segment
        return int((self.num_slots - 1) / pages), self.full_tokens // tokens

    def uncompressed_tokens(self, itemsize: int) -> int:
        """Tokens of an uncompressed cache in the same bytes, with `itemsize` bytes per element: 2 in 16 bits, 1 in
        FP8."""
        segment = self.layout.segment
        page_bytes = segment * self.layout.full_bytes_per_token(itemsize) + self.beside_bytes
        return (self.total_bytes - self.side_pages_bytes) * segment // page_bytes

    def describe(self) -> tuple[str, str, str, str]:
        """Return four lines: bytes, tokens, requests and budgets."""
        kept, segment = self.layout.kept, self.layout.segment
        low, middle, high = int(kept.min()), _median(kept.ravel().tolist()), int(kept.max())
        share = f"mean share {self.layout.mean_kept_share:.4f}"
        if self.layout.form.quantised:
            share += f" in {self.layout.form.name}, {self.layout.byte_share(self.itemsize):.4f} of the bytes"
            if low == segment:
                share += ": every token is kept"
        size = f"ragged KV pool: {_gib(self.total_bytes)}, {self.num_slots} pages of {_mib(self.page_bytes)}"
        if self.side_pages:
            size += f", {self.side_pages_of} {_gib(self.side_pages_bytes)} in {self.side_pages} pages"
        if self.beside_bytes:
            size += f", {_gib(self.num_slots * self.beside_bytes)} beside the pages"
        return (
            size,
            f"{self.max_total_tokens} virtual tokens, open segments with {self.open_pages.tokens} tokens a page; "
            f"uncompressed {self.uncompressed_tokens(2)} tokens in 16 bits, {self.uncompressed_tokens(1)} in FP8",
            f"{self.max_requests} requests at most; {' and '.join(map(self._load, TYPICAL_TOKENS))} at once",
            f"kept per {segment}-token segment min/median/max {low}/{middle:g}/{high} ({share})",
        )

    def _load(self, tokens: int) -> str:
        requests, full = self.requests_of(tokens)
        return f"{requests} requests of {tokens} tokens (full KV {full})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else _mib(size)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def fit_pool(
    layout: SlabLayout,
    itemsize: int,
    open_pages: OpenPages,
    budget_bytes: int,
    max_requests: int | None,
    side_bytes: int = 0,
    max_tokens: int | None = None,
    side_pages: SidePages | None = None,
    beside_bytes: int = 0,
) -> PoolSizes:
    """Divide a KV budget into pages for slabs and open segments, request rows, and side pages.

    Args:
        layout: the slab layout of this rank.
        itemsize: bytes per element of the KV dtype.
        budget_bytes: everything the pool may allocate on this rank.
        open_pages: of open segments.
        max_requests: the user's --max-running-requests, or None to choose it so that every request can have an open
            segment at its largest and a page more, and their rows take at most MAX_ROW_SHARE of the
            bytes and half of what compression frees (but at least one request).
        side_bytes: as in PoolSizes.
        max_tokens: --max-total-tokens, or None for all that the budget holds. A pool that it makes
            smaller has fewer requests, too.
        side_pages: what another pool needs, if there is one.
        beside_bytes: as in PoolSizes.

    Raises:
        RaggedConfigError: the budget does not hold what one request needs, or a limit is below what serves, or that
            other pool gets less than one request needs.
    """
    check_limits(layout.segment, max_requests, max_tokens)
    least = least_slots(open_pages)
    if max_tokens is not None and max_tokens // layout.segment + 1 < least:
        raise RaggedConfigError(
            f"--max-total-tokens {max_tokens} is too few for one request: its open segments can take "
            f"{open_pages.transient} pages of {layout.segment} tokens; it must be at least "
            f"{(least - 1) * layout.segment}"
        )
    most_slots = None if max_tokens is None else max_tokens // layout.segment + 1

    def with_requests(requests: int) -> PoolSizes:
        empty = PoolSizes(
            layout, itemsize, open_pages, 0, requests + 1, side_bytes=side_bytes, beside_bytes=beside_bytes
        )
        running = side_pages.running(requests, budget_bytes) if side_pages and max_requests is None else requests

        def with_slots(slots: int) -> PoolSizes:
            if side_pages is None:
                return replace(empty, num_slots=slots)
            return replace(
                empty,
                num_slots=slots,
                side_pages=side_pages.pages(slots, running, layout.segment),
                side_page_bytes=side_pages.page_bytes,
                side_pages_of=side_pages.what,
            )

        slots = range(max(budget_bytes, 0) // empty.page_bytes + 1)
        fitting = bisect.bisect_right(slots, budget_bytes, key=lambda count: with_slots(count).total_bytes) - 1
        if fitting < least:
            small = with_slots(least)
            beside = f" and {small.side_pages_bytes} for {small.side_pages_of}" if side_pages else ""
            raise RaggedConfigError(
                f"a KV budget of {budget_bytes} bytes is too small: {requests} running requests need "
                f"{small.rows_bytes} bytes, and one of them {least} pages of {small.page_bytes} bytes{beside}, "
                f"together {small.total_bytes}; give more memory (--kv-bytes, --mem-fraction-static), "
                f"fewer --max-running-requests or a shorter --ragged-segment"
            )
        plan = with_slots(min(fitting, most_slots or fitting))
        if side_pages is not None:
            side_pages.require(plan.side_pages, plan.num_slots)
        return plan

    if max_requests is not None:
        return with_requests(max_requests)
    alone = with_requests(1)
    freed = alone.freed_share
    share = min(MAX_ROW_SHARE, freed / 2) if freed > 0 else MAX_ROW_SHARE
    requests = min((alone.num_slots - 1) // (open_pages.most + 1), int(budget_bytes * share) // alone.row_bytes - 1)
    plan = with_requests(min(max(requests, 1), MAX_ROWS))
    # In a small pool the padding page and the rest of the budget weigh as much as request rows.
    while plan.warning and freed > 0 and plan.max_requests > 1:
        plan = with_requests(plan.max_requests // 2)
    return plan


def least_slots(open_pages: OpenPages) -> int:
    """Return the pages that serve one request whose prompt and whose answer fill at most a page, padding included.

    SGLang sets aside a page of each request, in addition to the most that an open segment can take. With one page fewer
    it would refuse every prompt (`allocator.clipped_new_tokens`).
    """
    return open_pages.transient + 4


def check_limits(segment: int, max_requests: int | None, max_tokens: int | None) -> None:
    """Raise RaggedConfigError for limits of --max-running-requests and --max-total-tokens that nothing fits."""
    if max_requests is not None and max_requests < 1:
        raise RaggedConfigError(f"--max-running-requests {max_requests} must be at least 1; drop it to have it chosen")
    if max_tokens is not None and max_tokens < segment:
        raise RaggedConfigError(
            f"--max-total-tokens {max_tokens} holds no whole segment: it must be at least {segment}, or take a "
            f"smaller --ragged-segment"
        )


def _median(values: list[int]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

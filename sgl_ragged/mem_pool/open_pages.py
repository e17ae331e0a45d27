"""Pages of the pool that an open segment takes. Plain arithmetic.

A page that holds no slab holds some tokens of one open segment, uncompressed. The segment's own page is the first; the
others, its extra pages, go back to the pool once the segment is sealed. While it is sealed it has one page more, its
stage, to which its own page is copied first: the slab takes the place of its first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError


@dataclass(frozen=True)
class OpenPages:
    """segment: tokens of a segment. tokens: tokens of an open segment per page, equal on all ranks."""

    segment: int
    tokens: int

    @classmethod
    def of(cls, segment: int, page_bytes: int, token_bytes: int) -> OpenPages:
        """Make the geometry from the bytes of a page, and of one uncompressed token with its scorer's inputs."""
        tokens = min(page_bytes // token_bytes, segment)
        if tokens < 1:
            raise RaggedConfigError(
                f"a slab of {page_bytes} bytes has no room for one uncompressed token of {token_bytes}: raise "
                f"--ragged-ratio, or take a longer --ragged-segment"
            )
        return cls(segment, tokens)

    @property
    def most(self) -> int:
        """Pages of a full open segment, its own included."""
        return -(-self.segment // self.tokens)

    @property
    def transient(self) -> int:
        """Most pages that a request needs in addition to one per segment: in a chunk that finishes a segment
        and leaves another nearly full."""
        return 2 * self.most - 1

    def extra(self, open_tokens: int) -> int:
        """Return the extra pages of an open segment with `tokens` tokens."""
        return max(-(-open_tokens // self.tokens) - 1, 0)

    def pages(self, tokens: int) -> int:
        """Return the pages of a sequence of `tokens` tokens: slabs, and those of its open segment."""
        sealed, rest = divmod(tokens, self.segment)
        return sealed + -(-rest // self.tokens)

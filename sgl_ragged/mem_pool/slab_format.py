"""Slab formats: bytes of a kept key and value in a slab, and the share of tokens that a share of the bytes holds.

A sealed segment is immutable, so it can be stored in few bits once, when it is sealed. Keys and values are then
rotated by a Hadamard matrix over the head dimension, which spreads outliers, and each row is rounded to codes with one
scale of 16 bits (`mem_pool.quantise`). Open segments stay as wide as they are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError

SCALE_BYTES = 2
"""Bytes of a float16: the scale of a key or value, and each number of a head's moments."""

CODES_VERSION = 2
"""Version of what the bytes of codes mean; part of the plan's digest, so that no other version reads them."""

LEAST_SCALE, MOST_SCALE = 2.0**-24, 65504.0
"""The smallest and largest positive numbers of float16."""


PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
"""Bits of a code by plane, lowest bits first: whole bytes of codes whose width does not divide 8."""


@dataclass(frozen=True)
class SlabFormat:
    """Format of kept rows in a slab.

    key_bits, value_bits: bits per code, one of PLANES; 0 for numbers of the cache's dtype.

    A head's part of a slab is its keys, its values, and then, of codes, the scales [kept, 2 (K, V)]. Wide keys and
    values are [kept, d]; those of codes are the planes of their codes, each [kept, d * bits of the plane / 8]. A plane
    goes by blocks of B dimensions, the largest power of two that divides d: byte j of a block has those dimensions of
    the block that are whole multiples of its bytes after j, the first of them lowest. Of four bits: j (low half) and
    j + B / 2.
    Where keys are `centred`, the moments of the head's rows come first, [2 (mean, spread), d]
    (`mem_pool.row_moments`): keys are divided by the spread of their channel, after the mean is subtracted from rows
    whose scale is positive. Where nothing is kept, nothing is stored.
    """

    name: str
    key_bits: int
    value_bits: int
    centred: bool = False

    @property
    def quantised(self) -> bool:
        return self.key_bits > 0

    def key_elems(self, head_dim: int) -> int:
        """Return the elements of a slab for one key: bytes if the format has codes, else numbers."""
        return head_dim * self.key_bits // 8 if self.quantised else head_dim

    def code_bytes(self, head_dim: int) -> int:
        """Bytes that the codes of a kept key and value take."""
        return head_dim * (self.key_bits + self.value_bits) // 8

    def row_elems(self, head_dim: int) -> int:
        """Elements of a slab that a kept token takes in one head: key, value and their scales."""
        if self.quantised:
            return self.code_bytes(head_dim) + 2 * SCALE_BYTES
        return 2 * head_dim

    def header_elems(self, head_dim: int) -> int:
        """Elements of a slab that a head's moments take, whatever else it keeps."""
        return 2 * SCALE_BYTES * head_dim if self.centred else 0

    def part_elems(self, kept: int, head_dim: int) -> int:
        """Elements of a head's part of a slab."""
        return kept * self.row_elems(head_dim) + (self.header_elems(head_dim) if kept else 0)

    def itemsize(self, cache_itemsize: int) -> int:
        """Return bytes per element of a slab, for a cache of `cache_itemsize` bytes per number."""
        return 1 if self.quantised else cache_itemsize

    def row_bytes(self, head_dim: int, cache_itemsize: int) -> int:
        """Bytes that a kept token takes in one head."""
        return self.row_elems(head_dim) * self.itemsize(cache_itemsize)

    def header_bytes(self, head_dim: int, cache_itemsize: int) -> int:
        """Bytes that a head's moments take in each segment."""
        return self.header_elems(head_dim) * self.itemsize(cache_itemsize)

    def token_share(self, ratio: float, head_dim: int, cache_itemsize: int, segment: int) -> float:
        """Share of the tokens that can be kept in a share of an uncompressed cache's bytes; at most 1.

        Args:
            segment: tokens per segment, each of which has the header once.
        """
        rows = ratio * 2 * head_dim * cache_itemsize - self.header_bytes(head_dim, cache_itemsize) / segment
        return min(1.0, rows / self.row_bytes(head_dim, cache_itemsize))

    def byte_share(self, kept: int, head_dim: int, cache_itemsize: int) -> float:
        """Return bytes of a head's part of a slab / bytes of the segment in an uncompressed cache."""
        part = self.part_elems(kept, head_dim) * self.itemsize(cache_itemsize)
        return part / (kept * 2 * head_dim * cache_itemsize)

    @property
    def divisor(self) -> int:
        """Number that head dimensions must be a multiple of."""
        if not self.quantised:
            return 1
        # Parts of heads begin at multiples of 16 bytes, and kept rows come in sixteens.
        narrowest = min(*PLANES[self.key_bits], *PLANES[self.value_bits])
        return max(8 // narrowest, 4 if self.centred else 2)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise RaggedConfigError for heads whose rows this format cannot lay out in whole bytes."""
        if head_dim % self.divisor:
            raise RaggedConfigError(
                f"--ragged-slab-dtype {self.name} needs a head dimension that {self.divisor} divides, not {head_dim}; "
                "use wide"
            )


WIDE = SlabFormat("wide", 0, 0)
INT8 = SlabFormat("int8", 8, 8)
BY_WIDTHS = {
    (keys, values): SlabFormat(f"k{keys}v{values}", keys, values, centred=keys < 8)
    for keys, values in itertools.product((8, 6, 5, 4, 3), (6, 5, 4, 3))
}
"""By bits of keys and values. Eight bits have enough codes for what all rows share."""

FORMATS = {one.name: one for one in (WIDE, INT8, *BY_WIDTHS.values())}
"""By name."""

AUTO = "auto"

ASKED = (AUTO, *FORMATS)
"""Values of --ragged-slab-dtype."""

BY_BITS = ((7.5, "int8"), (4.0, "k6v6"), (2.8, "k5v4"), (1.4, "k4v4"), (1.0, "k4v3"), (0.0, "k3v3"))
"""Formats that `auto` chooses from, widest first, each with the least bits per number of an uncompressed cache that it
is chosen for. docs/slab-formats.md has the ratios, docs/evaluation.md what was measured at some of them."""

CODED_RATIO, WIDE_RATIO = 0.3, 0.5
"""Defaults of --ragged-ratio by format, since codes lose less of three tenths of the bytes than wide
slabs of a half (docs/slab-formats.md)."""


@dataclass(frozen=True)
class Share:
    """A share of an uncompressed cache's bytes, in a format."""

    ratio: float
    form: SlabFormat


def settle_share(asked: str, ratio: float | None, head_dim: int, cache_itemsize: int, readable: bool = True) -> Share:
    """Return share and format for --ragged-slab-dtype and --ragged-ratio; ratio: None if it was not given.

    `auto` is wide at ratio 1, where exactness is promised, else the first of BY_BITS whose bits the ratio gives.

    Args:
        readable: whether what serves can read codes; else `auto` is `wide`.

    Raises:
        RaggedConfigError: the format does not exist.
    """
    if asked not in ASKED:
        raise RaggedConfigError(f"unknown --ragged-slab-dtype {asked!r}; known: {', '.join(ASKED)}")
    wide = asked == WIDE.name or (asked == AUTO and not readable)
    if ratio is None:
        ratio = WIDE_RATIO if wide else CODED_RATIO
    if asked != AUTO:
        return Share(ratio, FORMATS[asked])
    if wide or ratio == 1 or head_dim % 2:
        return Share(ratio, WIDE)
    name = next(name for least, name in BY_BITS if ratio * 8 * cache_itemsize >= least)
    form = FORMATS[name]
    return Share(ratio, BY_WIDTHS[8, 4] if head_dim % form.divisor else form)

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

    def check_head_dim(self, head_dim: int) -> None:
        """Raise RaggedConfigError for heads whose rows this format cannot lay out in whole bytes."""
        if not self.quantised:
            return
        # Parts of heads begin at multiples of 16 bytes, and kept rows come in sixteens.
        narrowest = min(*PLANES[self.key_bits], *PLANES[self.value_bits])
        divisor = max(8 // narrowest, 4 if self.centred else 2)
        if head_dim % divisor:
            raise RaggedConfigError(
                f"--ragged-slab-dtype {self.name} needs a head dimension that {divisor} divides, not {head_dim}; "
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

EIGHT_BIT_TOKENS = 0.75
"""The least share of the tokens that `auto` keeps in eight bits. Where they hold fewer, values take four: measured on
SmolLM2-135M, eight bits lose less at .78 of the tokens and more at .58 (docs/slab-formats.md)."""

SIX_BIT_TOKENS = 0.6
"""Share of the tokens in K8V4 below which `auto` gives keys six bits: measured on the same model,
eight bits lose less where K8V4 holds .77, six where it holds .51 and less."""

FOUR_BIT_TOKENS = 0.25
"""Share of the tokens in K8V4 below which `auto` gives keys four bits, which lose less where it holds
.13."""

CODED_RATIO, WIDE_RATIO = 0.3, 0.5
"""Defaults of --ragged-ratio by format, since codes lose less of three tenths of the bytes than wide
slabs of a half (docs/slab-formats.md)."""


@dataclass(frozen=True)
class Share:
    """A share of an uncompressed cache's bytes, in a format."""

    ratio: float
    form: SlabFormat


def settle_share(
    asked: str, ratio: float | None, head_dim: int, cache_itemsize: int, segment: int, readable: bool = True
) -> Share:
    """Return share and format for --ragged-slab-dtype and --ragged-ratio; ratio: None if it was not given.

    `auto` is wide at ratio 1, where exactness is promised; else eight bits where most tokens fit in them, else eight
    for keys and four for values, and six or four for keys where few tokens fit in those.

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
    sizes = (ratio, head_dim, cache_itemsize, segment)
    if INT8.token_share(*sizes) >= EIGHT_BIT_TOKENS:
        return Share(ratio, INT8)
    tokens = BY_WIDTHS[8, 4].token_share(*sizes)
    if tokens >= SIX_BIT_TOKENS or head_dim % 4:
        return Share(ratio, BY_WIDTHS[8, 4])
    return Share(ratio, BY_WIDTHS[6 if tokens >= FOUR_BIT_TOKENS else 4, 4])

"""Keys and values in few bits: codes and scales, a pure function of the rows that a head keeps.

Torch: the oracle, and what runs on CPUs. Sources: rotation by Hadamard matrices against outliers, QuaRot (2404.00456);
one scale per token and head, KIVI (2402.02750) for values. Here both, for segments that never change again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool import compiled
from sgl_ragged.mem_pool.row_moments import centred, row_moments
from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE, PLANES, SCALE_BYTES, SlabFormat


def rotation_block(head_dim: int) -> int:
    """Return the largest power of two that divides a head dimension: rotations mix dimensions in blocks of it."""
    return head_dim & -head_dim


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., d] in float32 by a Hadamard matrix in each block of `rotation_block(d)` dimensions.

    The matrix is its own inverse. By sums and differences in a fixed order, so that a row's bits depend on nothing but
    the row: a product of matrices may round otherwise for other shapes.
    """
    head_dim = x.shape[-1]
    block, width = rotation_block(head_dim), 1
    x = x.float()
    while width < block:
        pairs = x.unflatten(-1, (head_dim // (2 * width), 2, width))
        one, other = pairs.unbind(-2)
        mixed = torch.empty(pairs.shape, device=x.device)
        torch.add(one, other, out=mixed[..., 0, :])
        torch.sub(one, other, out=mixed[..., 1, :])
        x = mixed.flatten(-3)
        width *= 2
    return x * block**-0.5


@functools.cache
def rotation_matrix(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the matrix of `rotated`, float32 [d, d], for queries and outputs, whose last bits do not matter."""
    return rotated(torch.eye(head_dim, device=device))


FACTORS = {
    8: (1.0,),
    6: (1.0, 0.95, 0.9),
    5: (1.0, 0.95, 0.9, 0.85),
    4: (1.0, 0.94, 0.88, 0.82, 0.76),
    3: (1.0, 0.92, 0.84, 0.76, 0.68, 0.6),
}
"""Scales that are tried, by bits of a code: shares of the scale with which no number saturates."""

ERROR_STEPS, MOST_STEPS = 2.0**13, 2.0**16
"""Steps of the squared error of a number, in units of the largest scale, and the most that count. Errors are whole
numbers of steps, and float32 adds those of 256 numbers exactly in any order."""


@functools.cache
def _factors(bits: int, device: torch.device) -> torch.Tensor:
    """Return FACTORS on a device, copied there once."""
    return torch.tensor(FACTORS[bits], device=device)


@dataclass(frozen=True)
class Codes:
    """Rows in codes.

    codes: int8 [..., d], from -2^(bits - 1) to 2^(bits - 1) - 1; a code c stands for (c + 1/2) times the row's scale.
    scales: float16 [...]. The sign of a key's scale marks rows that the mean is not subtracted from.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantised(x: torch.Tensor, bits: int) -> Codes:
    """Round x [..., d], rotated, to codes with positive scales.

    Of the FACTORS, each row takes the first with the least squared error. Scales are rounded before they are used. A
    row of zeros has the least scale. A row with NaN has NaN as its scale, and stays NaN. What is too large for the
    scale saturates.
    """
    rows, half = rotated(x), 2 ** (bits - 1)
    return coded(rows, best_scales(rows, rows.abs().amax(dim=-1) / half, bits), bits)


def coded(rows: torch.Tensor, scales: torch.Tensor, bits: int) -> Codes:
    """Round rotated rows, float32 [..., d], to codes of float16 scales [...]."""
    return Codes(_levels(rows / scales.float()[..., None], bits).nan_to_num(0.0).to(torch.int8), scales)


def _levels(units: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes as float32 for numbers in units of the scale."""
    half = 2 ** (bits - 1)
    return units.floor().clamp_(-half, half - 1)


def best_scales(rows: torch.Tensor, largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Choose the scales, float16 [...], of rotated rows, float32 [..., d].

    Args:
        largest: float32 [...], scale with which no number of the row saturates.
    """
    factors = _factors(bits, rows.device).view(-1, *[1] * largest.ndim)
    scales = (largest * factors).clamp_(LEAST_SCALE, MOST_SCALE).half()
    if len(factors) == 1:
        return scales[0]
    steps = factors * factors * ERROR_STEPS
    best = (compiled_choice if rows.device.type == "cpu" else choice)(rows, scales, steps, bits)
    return scales.gather(0, best[None])[0]


def choice(rows: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers, int64 [...], of the scales with the least squared errors, the first of equals.

    Args:
        rows: float32 [..., d].
        scales: float16 [candidates, ...].
        steps: float32 [candidates, ...], steps of a squared error in units of the scale.
    """
    units = rows / scales.float()[..., None]
    errors = units.sub_(_levels(units, bits)).sub_(0.5).square_()
    errors.mul_(steps[..., None]).nan_to_num_(0.0).clamp_(max=MOST_STEPS).trunc_()
    return errors.sum(dim=-1).argmin(dim=0)


def compiled_choice(rows: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Compute `choice` on CPUs in one pass."""
    best = torch.empty(scales.shape[1:], dtype=torch.int64)
    flat = rows.reshape(-1, rows.shape[-1]).contiguous(), scales.view(len(steps), -1).float(), steps.view(-1)
    compiled.best_of_scales(*(x.numpy() for x in flat), bits, MOST_STEPS, best.view(-1).numpy())
    return best


def packed(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Pack codes int8 [..., d] into planes, uint8 [..., d * bits of the plane / 8], as `SlabFormat` lays them out.

    Codes of less than 8 bits are stored plus 2^(bits - 1), so that none is negative.
    """
    if bits == 8:
        return [codes.contiguous().view(torch.uint8)]
    numbers, block, planes = (codes + 2 ** (bits - 1)).view(torch.uint8), rotation_block(codes.shape[-1]), []
    for width in PLANES[bits]:
        planes.append(_folded(numbers & (2**width - 1), width, block))
        numbers = numbers >> width
    return planes


def _folded(numbers: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Fold numbers uint8 [..., d] below 2^bits into bytes uint8 [..., d * bits / 8].

    In each block, byte j holds number j and those that are whole numbers of bytes after it, the first lowest.
    """
    per_byte = 8 // bits
    parts = numbers.unflatten(-1, (-1, per_byte, block // per_byte)).unbind(-2)
    folded = functools.reduce(torch.bitwise_or, (part << (bits * place) for place, part in enumerate(parts)))
    return folded.flatten(-2)


def unpacked(planes: Sequence[torch.Tensor], bits: int, head_dim: int) -> torch.Tensor:
    """Unpack planes of `packed` to codes int8 [..., d]."""
    if bits == 8:
        return planes[0].view(torch.int8)
    block, first = rotation_block(head_dim), 0
    numbers = torch.zeros_like(planes[0][..., :1])
    for plane, width in zip(planes, PLANES[bits], strict=True):
        numbers = numbers | (_unfolded(plane, width, block) << first)
        first += width
    return numbers.view(torch.int8) - 2 ** (bits - 1)


def _unfolded(stored: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Unpack bytes of `_folded` to numbers."""
    parts = stored.unflatten(-1, (-1, block * bits // 8))
    places = range(0, 8, bits)
    return torch.stack([(parts >> place) & (2**bits - 1) for place in places], dim=-2).flatten(-3)


@dataclass(frozen=True)
class RowCodes:
    """Rows of heads in codes, [..., kept, d]; moments of the keys, float16 [..., 2, d], where they are centred."""

    keys: Codes
    values: Codes
    moments: torch.Tensor | None

    def part(self, heads: slice, rows: slice) -> RowCodes:
        """Take some heads and rows of codes [segments, heads, kept, d]."""
        keys, values = (
            Codes(one.codes[:, heads, rows], one.scales[:, heads, rows]) for one in (self.keys, self.values)
        )
        return RowCodes(keys, values, None if self.moments is None else self.moments[:, heads])

    def stored(self, form: SlabFormat) -> torch.Tensor:
        """Return heads' parts of slabs, uint8 [..., part bytes]."""
        header = [] if self.moments is None else [self.moments.contiguous().view(torch.uint8)]
        scales = torch.stack([self.keys.scales, self.values.scales], dim=-1).contiguous().view(torch.uint8)
        codes = (packed(one.codes, bits) for one, bits in ((self.keys, form.key_bits), (self.values, form.value_bits)))
        return torch.cat([part.flatten(-2) for part in (*header, *itertools.chain(*codes), scales)], dim=-1)


def stored_rows(keys: torch.Tensor, values: torch.Tensor, form: SlabFormat) -> torch.Tensor:
    """Return a head's part of a slab, uint8 [..., part bytes], for keys and values [..., kept, d]."""
    moments = None
    if form.centred:
        moments, uncentred = row_moments(keys)
        key_codes = marked(quantised(centred(keys, moments, uncentred), form.key_bits), uncentred)
    else:
        key_codes = quantised(keys, form.key_bits)
    return RowCodes(key_codes, quantised(values, form.value_bits), moments).stored(form)


def marked(keys: Codes, uncentred: torch.Tensor) -> Codes:
    """Give the scales of uncentred rows, bool [...], their sign."""
    return Codes(keys.codes, torch.where(uncentred, -keys.scales, keys.scales))


def restored(codes: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor | None) -> torch.Tensor:
    """Return the rows that codes [..., kept, d] + 1/2, float32, stand for.

    Args:
        scales: float32 [..., kept]. moments: those of keys that are centred.
    """
    rows = (codes * scales.abs()[..., None]) @ rotation_matrix(codes.shape[-1], codes.device)
    if moments is None:
        return rows
    mean, spread = moments.float()[..., None, :].unbind(-3)
    return torch.addcmul(mean * (scales > 0)[..., None], rows, spread)


@dataclass(frozen=True)
class QuantisedRows:
    """Views on the parts of heads in slabs.

    keys, values: planes of packed codes, uint8 [..., kept, bytes]. scales: float16 [..., kept, 2 (K, V)]. moments:
    `row_moments` of the keys, where the format's are centred.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scales: torch.Tensor
    form: SlabFormat
    moments: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: torch.Tensor, kept: int, head_dim: int, form: SlabFormat) -> QuantisedRows:
        """Make the views on bytes of `stored_rows`, uint8 [..., part bytes]."""
        widths = [PLANES[bits] for bits in (form.key_bits, form.value_bits)]
        planes = [kept * head_dim * width // 8 for width in itertools.chain(*widths)]
        header, *rows, scales = stored.split([form.header_elems(head_dim), *planes, kept * 2 * SCALE_BYTES], dim=-1)
        rows = [plane.unflatten(-1, (kept, -1)) for plane in rows]
        return cls(
            rows[: len(widths[0])],
            rows[len(widths[0]) :],
            scales.view(torch.float16).unflatten(-1, (kept, 2)),
            form,
            header.view(torch.float16).unflatten(-1, (2, head_dim)) if form.centred else None,
        )

    def rotated_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 codes plus 1/2 [..., kept, d] and scales [..., kept].

        Products of both, without the sign of the scales, are the rotated keys, centred if the format's are.
        """
        return self._levels(self.keys, self.form.key_bits), self.scales[..., 0].float()

    def rotated_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values as `rotated_keys` returns keys."""
        return self._levels(self.values, self.form.value_bits), self.scales[..., 1].float()

    def _levels(self, planes: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
        head_dim = sum(plane.shape[-1] for plane in planes) * 8 // bits
        return unpacked(planes, bits, head_dim).float().add_(0.5)

    def restored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the codes, float32 [..., kept, d]."""
        return restored(*self.rotated_keys(), self.moments), restored(*self.rotated_values(), None)

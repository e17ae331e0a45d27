"""Keys and values in few bits: codes and scales, a pure function of the rows that a head keeps.

Torch: the oracle, and what runs on CPUs. Sources: rotation by Hadamard matrices against outliers, QuaRot (2404.00456);
one scale per token and head, KIVI (2402.02750) for values. Here both, for segments that never change again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.row_moments import centred, row_moments
from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE, SlabFormat


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


def largest_code(bits: int) -> int:
    """Return the largest code; the smallest is its negative."""
    return 2 ** (bits - 1) - 1


def quantised(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [..., d], rotated, to codes int8 [..., d] and scales float16 [...]; code * scale is the number.

    The scale is rounded before it is used, so what is stored is the nearest that its own scale allows: an error of half
    a scale at most. A row of zeros has the least scale. A row with NaN has NaN as its scale, and stays NaN; what is too
    large for the scale saturates.
    """
    rows, most = rotated(x), largest_code(bits)
    scale = (rows.abs().amax(dim=-1) / most).clamp(LEAST_SCALE, MOST_SCALE).half()
    codes = (rows / scale.float()[..., None]).round().clamp(-most, most).nan_to_num(0.0)
    return codes.to(torch.int8), scale


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes int8 [..., d] into bytes uint8 [..., d * bits / 8], as `SlabFormat` lays them out.

    Of four and six bits, plus 8 and 32, so that none is negative.
    """
    if bits == 8:
        return codes.view(torch.uint8)
    numbers, block = (codes + 2 ** (bits - 1)).view(torch.uint8), rotation_block(codes.shape[-1])
    lower = _folded(numbers & 15, 4, block)
    return lower if bits == 4 else torch.cat([lower, _folded(numbers >> 4, 2, block)], dim=-1)


def _folded(numbers: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """uint8 [..., d * bits / 8] of numbers uint8 [..., d] of so many bits: in each block, byte j holds number j and
    those that are whole numbers of bytes after it, the first lowest."""
    per_byte = 8 // bits
    parts = numbers.unflatten(-1, (-1, per_byte, block // per_byte)).unbind(-2)
    folded = functools.reduce(torch.bitwise_or, (part << (bits * place) for place, part in enumerate(parts)))
    return folded.flatten(-2)


def unpacked(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes of `packed` to codes int8 [..., d]."""
    if bits == 8:
        return stored.view(torch.int8)
    head_dim = stored.shape[-1] * 8 // bits
    block = rotation_block(head_dim)
    numbers = _unfolded(stored[..., : head_dim // 2], 4, block)
    if bits == 6:
        numbers = numbers | (_unfolded(stored[..., head_dim // 2 :], 2, block) << 4)
    return numbers.view(torch.int8) - 2 ** (bits - 1)


def _unfolded(stored: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Unpack bytes of `_folded` to numbers."""
    parts = stored.unflatten(-1, (-1, block * bits // 8))
    places = range(0, 8, bits)
    return torch.stack([(parts >> place) & (2**bits - 1) for place in places], dim=-2).flatten(-3)


def stored_rows(keys: torch.Tensor, values: torch.Tensor, form: SlabFormat) -> torch.Tensor:
    """Return a head's part of a slab, uint8 [..., part bytes], for keys and values [..., kept, d]."""
    header = []
    if form.centred:
        moments = row_moments(keys)
        keys, header = centred(keys, moments), [moments.view(torch.uint8)]
    key_codes, key_scales = quantised(keys, form.key_bits)
    value_codes, value_scales = quantised(values, form.value_bits)
    scales = torch.stack([key_scales, value_scales], dim=-1).contiguous().view(torch.uint8)
    parts = *header, packed(key_codes, form.key_bits), packed(value_codes, form.value_bits), scales
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def stored_keys(keys: torch.Tensor, form: SlabFormat) -> torch.Tensor:
    """Round keys as this format stores them, float32 [..., kept, d], if these are all kept rows."""
    moments = row_moments(keys) if form.centred else None
    codes, scales = quantised(keys if moments is None else centred(keys, moments), form.key_bits)
    return _restored(codes.float(), scales.float(), moments)


def _restored(codes: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor | None) -> torch.Tensor:
    rows = (codes * scales[..., None]) @ rotation_matrix(codes.shape[-1], codes.device)
    if moments is None:
        return rows
    mean, spread = moments.float()[..., None, :].unbind(-3)
    return torch.addcmul(mean, rows, spread)


@dataclass(frozen=True)
class QuantisedRows:
    """Views on the parts of heads in slabs.

    keys, values: uint8 [..., kept, bytes], packed codes. scales: float16 [..., kept, 2 (K, V)]. moments:
    `row_moments` of the keys, where the format's are centred.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    form: SlabFormat
    moments: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: torch.Tensor, kept: int, head_dim: int, form: SlabFormat) -> QuantisedRows:
        """Make the views on bytes of `stored_rows`, uint8 [..., part bytes]."""
        parts = form.header_elems(head_dim), kept * form.key_elems(head_dim), kept * form.value_elems(head_dim)
        header, keys, values, scales = stored.split([*parts, stored.shape[-1] - sum(parts)], dim=-1)
        return cls(
            keys.unflatten(-1, (kept, -1)),
            values.unflatten(-1, (kept, -1)),
            scales.view(torch.float16).unflatten(-1, (kept, 2)),
            form,
            header.view(torch.float16).unflatten(-1, (2, head_dim)) if form.centred else None,
        )

    def rotated_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 codes [..., kept, d] and scales [..., kept]; their products are keys, centred if the format's are,
        and rotated."""
        return unpacked(self.keys, self.form.key_bits).float(), self.scales[..., 0].float()

    def rotated_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values as `rotated_keys` returns keys."""
        return unpacked(self.values, self.form.value_bits).float(), self.scales[..., 1].float()

    def restored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the codes, float32 [..., kept, d]."""
        return _restored(*self.rotated_keys(), self.moments), _restored(*self.rotated_values(), None)

"""Published schemes that keep every token and store its keys and values in few bits.

Schemes return what attention reads back. This module imports torch alone, so that the peers' environment can load it
(`peers.py`).

Sizes count codes and scales of quantised tokens. The latest tokens stay uncompressed and are not counted, as open
segments of a server are not.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch

FULL_BITS = 16
"""Bits per number of the cache that shares of bytes refer to, and of each stored scale."""


class Scheme(Protocol):
    """Round keys and values [..., tokens, head_dim] of consecutive tokens.

    Attributes:
        residual: number of latest tokens whose values are never rounded.
    """

    residual: ClassVar[int]

    def bits(self, head_dim: int) -> float:
        """Return mean bits per stored number, scales included."""
        ...

    def round_keys(self, keys: torch.Tensor) -> torch.Tensor: ...

    def round_values(self, values: torch.Tensor) -> torch.Tensor: ...


def quantise(
    scheme: Scheme, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache whose tokens `start` to `stop` have been completed.

    Args:
        keys, values: [..., tokens, head_dim]; tokens before `start` were completed by earlier calls.
        start, stop: multiples of a segment's tokens; `start` was the length of the cache in the call before, or is 0.
    """
    keys, values = keys.clone(), values.clone()
    if start < stop:
        keys[..., start:stop, :] = scheme.round_keys(keys[..., start:stop, :])
    first, last = max(start - scheme.residual, 0), min(stop, values.shape[-2] - scheme.residual)
    if first < last:
        values[..., first:last, :] = scheme.round_values(values[..., first:last, :])
    return keys, values


def uniform(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to 2^bits levels between the least and the greatest number along the last axis.

    Zero point and step are stored in 16 bits: z = min x, s = (max x - min x) / (2^bits - 1), code = round((x - z) / s).
    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), round-to-nearest quantisation.
    """
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    zero, step = _stored(low), _stored((high - low) / (2**bits - 1)).clamp_min(SMALLEST)
    return ((numbers - zero) / step).round().clamp(0, 2**bits - 1) * step + zero


class Kivi:
    """Groups of 32 tokens per channel for keys, groups of 32 channels per token for values.

    The latest 128 values are never rounded. Keys are rounded in blocks of 128 tokens, of which whole segments are
    multiples. Source: Liu et al. 2024, KIVI (arXiv 2402.02750), algorithm 1, with the paper's sizes.
    """

    group: ClassVar[int] = 32
    residual: ClassVar[int] = 128

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def bits(self, head_dim: int) -> float:
        return self._bits + 2 * FULL_BITS / self.group

    def round_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return self.round_values(keys.transpose(-1, -2)).transpose(-1, -2)

    def round_values(self, values: torch.Tensor) -> torch.Tensor:
        return uniform(values.unflatten(-1, (-1, self.group)), self._bits).flatten(-2)


def lloyd_max(bits: int) -> torch.Tensor:
    """Return the 2^bits points, rising, that round a standard normal number with the least squared error, in float64.

    Borders are midpoints between points, points are means between borders; repeated until nothing moves.
    Source: Max 1960, Quantizing for minimum distortion, table I.
    """
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    points = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    edge = torch.tensor([math.inf], dtype=torch.float64)
    while True:
        borders = torch.cat([-edge, (points[1:] + points[:-1]) / 2, edge])
        density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
        means = (density[:-1] - density[1:]) / normal.cdf(borders).diff()
        if torch.allclose(means, points, rtol=0, atol=1e-10):
            return means
        points = means


class TurboQuant:
    """Rotate each vector at random, round its coordinates to points for the normal distribution, store its norm.

    A coordinate of a random unit vector has a Beta distribution close to N(0, 1 / head_dim), for which the points are
    made. All channels have equally many bits: the paper's split of channels into two precisions is left out.
    Source: Zandieh et al. 2025, TurboQuant (arXiv 2504.19874), algorithm 1 (mean squared error).
    """

    residual: ClassVar[int] = 0

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._points = lloyd_max(bits).float()
        self._rotations: dict[int, torch.Tensor] = {}

    def bits(self, head_dim: int) -> float:
        return self._bits + FULL_BITS / head_dim

    def round_keys(self, keys: torch.Tensor) -> torch.Tensor:
        head_dim = keys.shape[-1]
        rotation = self._rotation(head_dim)
        scale = _stored(keys.norm(dim=-1, keepdim=True)).clamp_min(SMALLEST) / math.sqrt(head_dim)
        borders = (self._points[1:] + self._points[:-1]) / 2
        codes = torch.bucketize((keys @ rotation / scale).contiguous(), borders)
        return (self._points[codes] * scale) @ rotation.T

    round_values = round_keys

    def _rotation(self, head_dim: int) -> torch.Tensor:
        """Return the orthogonal matrix of all layers and heads, float32 [head_dim, head_dim]."""
        if head_dim not in self._rotations:
            normal = torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            basis, triangle = torch.linalg.qr(normal)
            self._rotations[head_dim] = (basis * triangle.diagonal().sign()).float()
        return self._rotations[head_dim]


class Fp8:
    """Cast to e4m3 without a scale, as SGLang's `--kv-cache-dtype fp8_e4m3` does for checkpoints without scales.

    Numbers beyond 448 become 448. Source: Micikevicius et al. 2022, FP8 formats for deep learning (arXiv 2209.05433).
    """

    residual: ClassVar[int] = 0

    def bits(self, head_dim: int) -> float:
        return 8

    def round_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.clamp(-448, 448).to(torch.float8_e4m3fn).to(keys.dtype)

    round_values = round_keys


SMALLEST = 2.0**-24
"""The smallest positive number of 16 bits: the step of a group whose numbers are equal."""


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Round to 16 bits."""
    return scales.half().to(scales.dtype)


SCHEMES: dict[str, Scheme] = {
    "KIVI-4": Kivi(4),
    "KIVI-2": Kivi(2),
    "TurboQuant-4": TurboQuant(4),
    "TurboQuant-3": TurboQuant(3),
    "FP8": Fp8(),
}
"""By the name that results have."""


def byte_share(name: str, head_dim: int) -> float:
    """Return stored bytes per byte of a 16-bit cache."""
    return SCHEMES[name].bits(head_dim) / FULL_BITS

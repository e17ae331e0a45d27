"""Codes of fitted rows: each rounding error is fed back into what is rounded after it.

Attention reads products of keys with queries, and sums of values with weights. So other dimensions of a key can make
good an error in one of them, and other tokens an error in the value of one. With M the second moments of queries (keys)
or weights (values), numbers are rounded in order, and each error moves those that follow to where M is least. The slab
format does not change.

Source: GPTQ (2210.17323), there for weights, here with the reverse Cholesky factor: with M = R R' and R upper
triangular, number i is rounded after the sum over j < i of (R_ji / R_ii) error_j is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.quantise import Codes, best_scales, rotation_matrix
from sgl_ragged.mem_pool.row_moments import LEAST_SHARE
from sgl_ragged.mem_pool.slab_format import LEAST_SCALE, MOST_SCALE, SlabFormat

QUERY_RIDGE, STORED_RIDGE = 0.02, 0.01
"""Ridges of the second moments of queries, before and after they are rotated, as shares of the mean diagonal."""

MOST_UNITS = 2.0**20
"""The largest number in units of its scale; codes end at 2^7."""

FeedBack = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function (units, factor, bits) that rounds numbers in order.

units: float32 [segments, heads, n, w], numbers in units of their scales, finite.
factor: float32 [segments, heads, n, n], strictly upper triangular: what is added to number j for each unit of the error
    of number i < j.
Returns codes, int8 like units.
"""


@dataclass(frozen=True)
class RoundedKeys:
    """Keys of heads as slabs store them.

    codes: of [segments, heads, n, d]. moments: float16 [segments, heads, 2, d], or None if the format is not centred.
    decoded: float32 [segments, heads, n, d], the keys that attention will see.
    """

    codes: Codes
    moments: torch.Tensor | None
    decoded: torch.Tensor


def query_moments(queries: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Compute second moments of queries, weighted by the squared share of their attention.

    Args:
        queries: float32 [segments, heads, d, m].
        shares: float32 [segments, heads, 1, m], shares of attention that go to the segment.

    Returns:
        float32 [segments, heads, d, d].
    """
    weighted = queries * shares
    moments = weighted @ weighted.transpose(2, 3)
    moments.diagonal(dim1=2, dim2=3).add_(QUERY_RIDGE * _mean_diagonal(moments))
    return moments


def round_keys(
    keys: torch.Tensor,
    own: torch.Tensor | None,
    query_moments: torch.Tensor,
    form: SlabFormat,
    feed_back: FeedBack,
) -> RoundedKeys:
    """Round the keys [segments, heads, n, d] that heads keep.

    Args:
        own: bool [heads, n, 1], whether the head keeps the row; None if it keeps all.
        query_moments: see `query_moments`.
    """
    bits, matrix = form.key_bits, rotation_matrix(keys.shape[-1], keys.device)
    mean, spread, moments, uncentred = 0.0, 1.0, None, None
    if form.centred:
        mean, spread, uncentred = _moments(keys, own)
        moments = torch.cat([mean, spread], dim=2).half()
        mean = mean * ~uncentred
        query_moments = query_moments * (spread.transpose(2, 3) * spread)
    rotated = ((keys - mean) / spread) @ matrix
    stored_moments = matrix @ query_moments @ matrix
    stored_moments.diagonal(dim1=2, dim2=3).add_(STORED_RIDGE * _mean_diagonal(stored_moments))
    scales = best_scales(rotated, rotated.abs().amax(dim=-1) / 2 ** (bits - 1), bits)
    units = _in_units(rotated, scales).transpose(2, 3)
    lower, failed = torch.linalg.cholesky_ex(stored_moments.flip((2, 3)))
    codes = feed_back(units, _factor(lower, failed), bits).transpose(2, 3)
    decoded = (codes + 0.5) * scales.float()[..., None] @ matrix * spread + mean
    if uncentred is not None:
        scales = torch.where(uncentred[..., 0], -scales, scales)
    return RoundedKeys(Codes(codes, scales), moments, decoded)


def round_values(
    values: torch.Tensor, lower: torch.Tensor, usable: torch.Tensor, bits: int, feed_back: FeedBack
) -> Codes:
    """Round the values [segments, heads, n, d] that heads keep, the last row first.

    Args:
        lower: float32 [segments, heads, n, n], Cholesky factor of the second moments of the rows' weights.
        usable: bool [segments, heads]; errors are not fed back in other heads.
    """
    rows = (values @ rotation_matrix(values.shape[-1], values.device)).flip(2)
    scales = best_scales(rows, rows.abs().amax(dim=-1) / 2 ** (bits - 1), bits)
    wide = scales.float()[..., None]
    factor = (_factor(lower, ~usable) * (wide / wide.transpose(2, 3))).nan_to_num_(0.0)
    codes = feed_back(_in_units(rows, scales), factor, bits)
    return Codes(codes.flip(2), scales.flip(2))


def _in_units(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide rows [.., n, d] by their scales [.., n]. Numbers are finite, so that a row that is undefined leaves the
    others alone."""
    return (rows / scales.float()[..., None]).nan_to_num_(0.0).clamp_(-MOST_UNITS, MOST_UNITS)


def _factor(lower: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
    """Return the factor of `FeedBack` for numbers in the reverse order of those of a Cholesky factor; 0 where it
    failed."""
    upper = lower.flip((2, 3))
    factor = (upper / upper.diagonal(dim1=2, dim2=3)[..., None, :]).triu_(1)
    return torch.where((failed == 0)[..., None, None], factor, 0.0).nan_to_num_(0.0, 0.0, 0.0)


def _mean_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Average the diagonals of matrices [.., d, d]: [.., 1]."""
    return x.diagonal(dim1=-2, dim2=-1).mean(dim=-1, keepdim=True)


def _moments(keys: torch.Tensor, own: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the moments of the keys that each head keeps, those of `row_moments` but for the order of sums.

    Returns:
        Mean and spread, float32 [segments, heads, 1, d], and uncentred rows, bool [segments, heads, n, 1].
    """
    keys = keys.nan_to_num(0.0).clamp_(-MOST_SCALE, MOST_SCALE)
    mean, widths = _mean_and_distances(keys, None if own is None else own.float())
    weights = mean / widths.clamp_min(LEAST_SCALE)
    uncentred = ((2 * keys - mean) * weights).sum(dim=-1, keepdim=True) < 0
    counts = (~uncentred if own is None else own & ~uncentred).float()
    mean, distances = _mean_and_distances(keys, counts)
    spread = torch.maximum(distances, widths.mul_(LEAST_SHARE)).sqrt_().clamp_min_(LEAST_SCALE).half().float()
    return mean, spread, uncentred


def _mean_and_distances(keys: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and root mean square distance, float32 [.., 1, d], of the rows whose `counts` [.., n, 1] is 1."""
    if counts is None:
        mean = keys.mean(dim=-2, keepdim=True).half().float()
        return mean, (keys - mean).square_().mean(dim=-2, keepdim=True).sqrt_()
    count = counts.sum(dim=-2, keepdim=True).clamp_min(1.0)
    mean = ((keys * counts).sum(dim=-2, keepdim=True) / count).half().float()
    return mean, ((keys - mean).square_().mul_(counts).sum(dim=-2, keepdim=True) / count).sqrt_()

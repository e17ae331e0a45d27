"""Measured quality in a profile: how far servers with it are from the uncompressed model, by ratio.

`python -m calib quality` measures it; `sgl-ragged layout` shows it, and `--ragged-quality` chooses a ratio by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

LEAST_KL = 1e-9
"""Smallest KL in interpolation, where logarithms of zero would be infinite."""


@dataclass(frozen=True)
class MeasuredQuality:
    """Distances of a server from the reference, means over all positions of all texts.

    ratio: kept / full KV bytes, as asked for. slab_dtype: the format that `auto` chose. token_share: kept share of the
    tokens. kl: KL(reference || server), nats. nll: increase of the negative log-likelihood, nats. same_top1: share of
    positions with the same likeliest token. kl_by_text: KL of each text.
    """

    ratio: float
    slab_dtype: str
    token_share: float
    kl: float
    nll: float
    same_top1: float
    kl_by_text: Mapping[str, float]


def to_json(rows: Sequence[MeasuredQuality]) -> str:
    """Return the text that a profile stores."""
    return json.dumps([asdict(replace(row, kl_by_text=dict(row.kl_by_text))) for row in rows])


def from_json(text: str) -> tuple[MeasuredQuality, ...]:
    """Read what `to_json` returned. Raises ValueError, KeyError or TypeError for anything else."""
    return tuple(MeasuredQuality(**row | {"kl_by_text": dict(row["kl_by_text"])}) for row in json.loads(text))


def merge(old: Sequence[MeasuredQuality], new: Sequence[MeasuredQuality]) -> tuple[MeasuredQuality, ...]:
    """Return both, highest ratio first; a new row replaces an old one of the same ratio."""
    rows = {row.ratio: row for row in (*old, *new)}
    return tuple(rows[ratio] for ratio in sorted(rows, reverse=True))


def kl_at(rows: Sequence[MeasuredQuality], ratio: float) -> float | None:
    """Return the KL at a ratio, interpolated in logarithms; None outside of what was measured."""
    for high, low in pairwise([*rows, *rows[-1:]]):
        if low.ratio <= ratio <= high.ratio:
            return _interpolate(ratio, (high.ratio, high.kl), (low.ratio, low.kl))
    return None


def least_ratio(rows: Sequence[MeasuredQuality], kl: float) -> float | None:
    """Return the least ratio that has at most this KL, as have all higher ones; None if the highest measured has more.

    Between measured ratios of one format the crossing is interpolated in logarithms. Where the format changes between
    them, KL jumps at an unknown ratio, so the higher one is returned. Nothing is extrapolated below the lowest.
    """
    if not rows or rows[0].kl > kl:
        return None
    for high, low in pairwise(rows):
        if low.kl > kl:
            if low.slab_dtype != high.slab_dtype:
                return high.ratio
            return _interpolate(kl, (high.kl, high.ratio), (low.kl, low.ratio))
    return rows[-1].ratio


def _interpolate(x: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return y at x on the line through two points (x, y), all in logarithms."""
    logs = [[math.log(max(value, LEAST_KL)) for value in point] for point in (one, other)]
    (x1, y1), (x2, y2) = logs
    share = 0.0 if x1 == x2 else (math.log(max(x, LEAST_KL)) - x1) / (x2 - x1)
    return math.exp(y1 + share * (y2 - y1))


def quality_faults(rows: Sequence[MeasuredQuality]) -> Iterator[str]:
    """Yield what is wrong with measured quality, one reason each."""
    for row in rows:
        numbers = (row.ratio, row.token_share, row.kl, row.nll, row.same_top1, *row.kl_by_text.values())
        if not all(math.isfinite(number) for number in numbers) or not 0 < row.ratio <= 1:
            yield f"quality at ratio {row.ratio} has numbers out of range"
    if [row.ratio for row in rows] != sorted({row.ratio for row in rows}, reverse=True):
        yield "quality must have each ratio once, highest first"

"""Attention matching: what a head keeps of a segment is corrected so that it stands for all of it.

Source: "Attention Matching" (2602.16284): a bias per kept token so that the softmax mass fits, values so that the
output fits. Here per sealed segment and head, with queries of a codebook, the bias carried by the keys themselves, and
both measured against all that a query attends to: so a segment that is one of many has little to answer for.

Of a query with logits l over the segment: mass M = sum exp l, N = sum exp(l) v; R and o are mass and output of
everything else that it saw when it was recorded; D = M + R.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sgl_ragged.mem_pool.references import References
from sgl_ragged.scorers.expected_attention import turn

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""What one kept token may count."""

MASS_RIDGE, VALUE_RIDGE = 3e-6, 3e-5
"""Per query, in squared shares of attention: how much weights and values hold on to 1 and to what they were."""

STEPS = 60
"""Of the projected gradient; 300 gave the same."""

MOST_GROWTH = 4.0
"""Fitted values are at most this many times as large as the largest kept one, or the head keeps its own."""

AT_ONCE_BYTES = 32 << 20
"""Of exponentials that are held at a time."""

Stored = Callable[[torch.Tensor], torch.Tensor]
"""What keys [segments, heads, kept, d] will be once they are stored."""


def matched(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of what is kept, corrected.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE.
        places: int64 [segments, heads, kept], what is kept of them.
        numbers: integers [segments], the segments' numbers in their sequences.
        references: of these heads.

    Returns:
        float32 [segments, heads, kept, d] each: keys before they are stored, values behind the keys as stored. Where
        the fit would not bring the outputs of the codebook's queries nearer, and where a value would grow beyond
        MOST_GROWTH, what was there. Does not change its arguments.
    """
    per_segment = 4 * references.queries.shape[0] * references.queries.shape[1] * keys.shape[2]
    at_once = max(1, AT_ONCE_BYTES // per_segment)
    parts = []
    for start in range(0, len(keys), at_once):
        own = slice(start, min(start + at_once, len(keys)))
        parts.append(_matched(keys[own], values[own], places[own], numbers[own], references, stored))
    fitted_keys, fitted_values = zip(*parts, strict=True)
    return torch.cat(fitted_keys), torch.cat(fitted_values)


def _matched(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, length = keys.float(), values.float(), keys.shape[2]
    count, dim = references.queries.shape[1:]
    ends = ((numbers + 1) * length - 1)[:, None, None]

    def from_the_end(rows: torch.Tensor) -> torch.Tensor:
        rows = rows if references.order is None else rows[..., references.order]
        return turn(rows, -ends, references.frequencies)

    queries, first = references.queries.float(), (numbers == 0)[:, None, None]
    rest = torch.where(first, references.masses[:, 1], references.masses[:, 0])
    logits = queries @ from_the_end(keys).transpose(2, 3)
    most = torch.maximum(logits.amax(dim=-1), rest)
    exps = (logits - most[..., None]).exp_()
    mass, sums, others = exps.sum(dim=-1), exps @ values, (rest - most).exp_()
    whole = mass + others
    index = places[..., None].expand(*places.shape, dim)
    kept_keys, kept_values = keys.gather(2, index), values.gather(2, index)
    kept = exps.gather(3, places[:, :, None].expand(*exps.shape[:3], places.shape[2]))

    weights = _weights(kept / whole[..., None], mass / whole)
    bias = turn(references.bias[None, :, None].expand(len(keys), -1, -1, -1), ends, references.frequencies)
    bias = bias if references.inverse is None else bias[..., references.inverse]
    longer = kept_keys + weights.log()[..., None] * bias

    logits = queries @ from_the_end(stored(longer).float()).transpose(2, 3)
    # Stored keys may lie beyond all true logits.
    higher = torch.maximum(most, logits.amax(dim=-1))
    fewer = (most - higher).exp()
    mass, sums, others, whole = mass * fewer, sums * fewer[..., None], others * fewer, whole * fewer
    shares = (logits - higher[..., None]).exp_()
    whole_now = shares.sum(dim=-1) + others
    shares /= whole_now[..., None]
    output = torch.where(first[..., None], references.outputs[:, 1], references.outputs[:, 0]).float()
    aim = sums / whole[..., None] + (others / whole - others / whole_now)[..., None] * output
    gap = aim - shares @ kept_values
    gram = shares.transpose(2, 3) @ shares
    gram.diagonal(dim1=-2, dim2=-1).add_(VALUE_RIDGE * count)
    factor, _ = torch.linalg.cholesky_ex(gram)
    moved = torch.cholesky_solve(shares.transpose(2, 3) @ gap, factor)

    before = kept.sum(dim=-1) * fewer + others
    plain = (sums / whole[..., None] + (others / whole - others / before)[..., None] * output) - (
        (kept * (fewer / before)[..., None]) @ kept_values
    )
    fits = (gap - shares @ moved).square().sum(dim=(-1, -2)) < plain.square().sum(dim=(-1, -2))
    fitted = kept_values + moved
    fits &= fitted.abs().amax(dim=(-1, -2)) <= MOST_GROWTH * kept_values.abs().amax(dim=(-1, -2))
    fits = fits[..., None, None]
    return torch.where(fits, longer, kept_keys), torch.where(fits, fitted, kept_values)


def _weights(shares: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """What each kept token counts, so that their shares of attention give what the segment had.

    Minimises, over w in [LEAST_WEIGHT, MOST_WEIGHT], sum (shares w - wanted)^2 + MASS_RIDGE m |w - 1|^2, by projected
    Nesterov steps on variables scaled by the diagonal.

    Args:
        shares: [..., m, kept]; wanted: [..., m].

    Returns:
        [..., kept].
    """
    ridge = MASS_RIDGE * shares.shape[-2]
    gram = shares.transpose(-1, -2) @ shares
    linear = (shares.transpose(-1, -2) @ wanted[..., None])[..., 0] + ridge
    scale = (gram.diagonal(dim1=-2, dim2=-1) + ridge).sqrt()
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    gram /= scale[..., None] * scale[..., None, :]
    linear /= scale
    # No eigenvalue is larger than the largest sum of a row.
    step = 1 / gram.sum(dim=-1).amax(dim=-1, keepdim=True)
    low, high = LEAST_WEIGHT * scale, MOST_WEIGHT * scale
    now, ahead, momentum = scale, scale, 1.0
    for _ in range(STEPS):
        slope = (gram @ ahead[..., None])[..., 0] - linear
        after = torch.clamp(ahead - step * slope, low, high)
        momentum, last = (1 + math.sqrt(1 + 4 * momentum**2)) / 2, momentum
        ahead = after + (last - 1) / momentum * (after - now)
        now = after
    return now / scale

"""Attention matching: what a head keeps of a segment is corrected so that it stands for all of it.

Source: "Attention Matching" (2602.16284): a bias per kept token so that the softmax mass fits, values so that the
output fits. Here per sealed segment and head, with queries of a codebook, the bias carried by the keys themselves, and
both measured against all that a query attends to: so a segment that is one of many has little to answer for.

Of a query with logits l over the segment: mass M = sum exp l, N = sum exp(l) v; R and o are mass and output of
everything else that it saw when it was recorded; D = M + R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from sgl_ragged.fitting.references import References

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""What one kept token may count."""

MASS_RIDGE, VALUE_RIDGE = 3e-6, 1e-5
"""Per query, in squared shares of attention: how much weights and values hold on to 1 and to what they were."""

STEPS = 8
"""Of the projected gradient: what is left of the mass is left to the values; more made outputs no better."""

MOST_CORRECTED = 64
"""Of the tokens that a head keeps, how many are corrected: those that the codebook attends to most."""

MOST_GROWTH = 4.0
"""Fitted values are at most this many times as large as the largest kept one, or the head keeps its own."""

AT_ONCE_BYTES = 32 << 20
"""Of exponentials that are held at a time."""

Stored = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What rows of keys [segments, heads, n, d] will be once they are stored at places [segments, heads, n], among all keys
[segments, heads, S, d], of which some are kept, bool [segments, heads, S]."""


@dataclass(frozen=True)
class Corrections:
    """Rows of segments to be replaced before they are stored.

    places: int64 [segments, heads, n]. keys, values: float32 [segments, heads, n, d]; where nothing is to be corrected,
    what was there.
    """

    places: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, parts: Sequence[Corrections]) -> Corrections:
        """Those of several runs of segments."""
        return cls(*(torch.cat([getattr(one, part.name) for one in parts]) for part in fields(cls)))


def corrections(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
) -> Corrections:
    """Correct kept keys and values, MOST_CORRECTED of each head at most: those that are attended to most.

    Where the outputs of the codebook's queries would not come nearer, and where a value would grow beyond MOST_GROWTH,
    nothing is corrected.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE.
        kept: bool [segments, heads, S].
        numbers: integers [segments], the segments' numbers in their sequences.
        references: of these heads.
    """
    per_segment = 4 * references.queries.shape[0] * references.queries.shape[2] * keys.shape[2]
    at_once = max(1, AT_ONCE_BYTES // per_segment)
    split = (x.split(at_once) for x in (keys, values, kept, numbers))
    parts = [_correct(k, v, own, n, references, stored) for k, v, own, n in zip(*split, strict=True)]
    return parts[0] if len(parts) == 1 else Corrections.of(parts)


def _correct(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
) -> Corrections:
    keys, values, (length, dim) = keys.float(), values.float(), keys.shape[2:]
    # The codebook's queries look back from each segment's last token.
    queries, bias = references.seen_from((numbers + 1) * length - 1)
    version = (numbers == 0).long()
    rest = references.masses.index_select(1, version).transpose(0, 1)[:, :, None]
    output = references.outputs.index_select(1, version).transpose(0, 1).float()
    kept_values = values.masked_fill(~kept[..., None], 0.0)
    logits = keys @ queries
    most = torch.maximum(logits.amax(dim=2, keepdim=True), rest)
    exps, others = logits.sub_(most).exp_(), (rest - most).exp_()
    summed = torch.cat([values, kept_values, torch.ones_like(values[..., :1]), kept[..., None].float()], dim=-1)
    true, plain, mass, before = (summed.transpose(2, 3) @ exps).split([dim, dim, 1, 1], dim=2)
    whole, before = mass + others, before + others

    places = _most_attended(exps, whole, kept, MOST_CORRECTED)
    valid = kept.gather(2, places)[..., None]
    mine = _rows(exps, places).mul_(valid)
    unchanged = before - mine.sum(dim=2, keepdim=True)
    weights = _weights(mine / whole, (whole - unchanged) / whole)
    own_keys, own_values = _rows(keys, places), _rows(kept_values, places)
    longer = torch.where(valid, own_keys + weights.log() * bias.transpose(2, 3), own_keys)

    # Stored keys may lie beyond all true logits: so far that exponentials overflow, the head keeps its own.
    changed = (stored(longer, places, keys, kept) @ queries).sub_(most).exp_().mul_(valid)
    now = changed.sum(dim=2, keepdim=True) + unchanged
    changed /= now
    # What all that a query saw gives, and, times `before`, what is left if nothing is corrected.
    true, plain = torch.addcmul(true, others, output).div_(whole), torch.addcmul(plain, others, output)
    gap = torch.addcmul(true, plain, now.reciprocal(), value=-1)
    gap.flatten(0, 1).baddbmm_(own_values.transpose(2, 3).flatten(0, 1), mine.div_(now).sub_(changed).flatten(0, 1))
    ridge, wanted = VALUE_RIDGE * queries.shape[3], changed @ gap.transpose(2, 3)
    gram = changed @ changed.transpose(2, 3)
    gram.diagonal(dim1=2, dim2=3).add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(gram)
    moved = torch.cholesky_solve(wanted, factor)

    # Of squares of the gap, ridge regression leaves |gap|^2 - <moved, wanted> - ridge |moved|^2.
    left = _squares(gap) - (moved * (wanted + ridge * moved)).sum(dim=(2, 3))
    fits = (left < _squares(torch.addcmul(true, plain, before.reciprocal(), value=-1))) & (failed == 0)
    fitted = own_values + moved
    fits &= fitted.abs().amax(dim=(2, 3)) <= MOST_GROWTH * kept_values.abs().amax(dim=(2, 3))
    fits = fits[..., None, None] & valid
    return Corrections(places, torch.where(fits, longer, own_keys), torch.where(fits, fitted, _rows(values, places)))


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares of matrices [.., n, m]: [..]."""
    return torch.linalg.vector_norm(x, dim=(-2, -1)).square()


def _rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows [segments, heads, n, c] of x [segments, heads, S, c] at places [segments, heads, n]: a copy."""
    rows = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1) * x.shape[2] + places
    return x.flatten(0, 2).index_select(0, rows.flatten()).view(*places.shape, x.shape[3])


def _most_attended(exps: torch.Tensor, whole: torch.Tensor, kept: torch.Tensor, count: int) -> torch.Tensor:
    """The kept tokens with the largest shares of attention, then any others: int64 [segments, heads, count].

    Args:
        exps: [segments, heads, S, m]. whole: [segments, heads, 1, m], what they are shares of. kept: bool [.., S].
    """
    shares = (whole.reciprocal() @ exps.transpose(2, 3))[..., 0, :].masked_fill(~kept, -1.0)
    return shares.argsort(dim=-1, descending=True, stable=True)[..., :count]


def _weights(shares: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Weights of kept tokens with which their shares of attention give what the segment had.

    Minimises, over w in [LEAST_WEIGHT, MOST_WEIGHT], sum (shares w - wanted)^2 + MASS_RIDGE m |w - 1|^2, by projected
    Nesterov steps on variables scaled by the diagonal.

    Args:
        shares: [..., kept, m]; wanted: [..., 1, m].

    Returns:
        [..., kept, 1].
    """
    ridge = MASS_RIDGE * shares.shape[-1]
    gram = shares @ shares.transpose(-1, -2)
    linear = shares @ wanted.transpose(-1, -2) + ridge
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    scale = gram.diagonal(dim1=-2, dim2=-1)[..., None].sqrt()
    gram /= scale * scale.transpose(-1, -2)
    # No eigenvalue is larger than the largest sum of a row.
    step = 1 / gram.sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)
    gram.mul_(-step).diagonal(dim1=-2, dim2=-1).add_(1.0)
    gram, linear, unit = gram.flatten(0, -3), (linear / scale * step).flatten(0, -3), scale.flatten(0, -3)
    low, high = LEAST_WEIGHT * unit, MOST_WEIGHT * unit
    now, ahead, momentum = unit, unit, 1.0
    for _ in range(STEPS):
        after = torch.clamp(torch.baddbmm(linear, gram, ahead), low, high)
        momentum, last = (1 + math.sqrt(1 + 4 * momentum**2)) / 2, momentum
        ahead = torch.lerp(now, after, 1 + (last - 1) / momentum)
        now = after
    return (now / unit).view(scale.shape)

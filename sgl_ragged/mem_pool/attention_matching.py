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

from sgl_ragged.mem_pool.references import References, Rotation

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
"""What one kept token may count."""

MASS_RIDGE, VALUE_RIDGE = 3e-6, 3e-5
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
    """What corrects kept keys and values, MOST_CORRECTED of each head at most: those that are attended to most.

    Where the outputs of the codebook's queries would not come nearer, and where a value would grow beyond MOST_GROWTH,
    nothing is corrected.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE.
        kept: bool [segments, heads, S].
        numbers: integers [segments], the segments' numbers in their sequences.
        references: of these heads.
    """
    per_segment = 4 * references.queries.shape[0] * references.queries.shape[1] * keys.shape[2]
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
    keys, values, length = keys.float(), values.float(), keys.shape[2]
    # RoPE at the position of each segment's last token, from where the codebook's queries are seen.
    rope = Rotation.at((numbers + 1) * length - 1, references)
    queries, first = references.queries.float(), (numbers == 0)[:, None, None]
    rest = torch.where(first, references.masses[:, 1], references.masses[:, 0])
    output = torch.where(first[..., None], references.outputs[:, 1], references.outputs[:, 0]).float()
    kept_values = values.masked_fill(~kept[..., None], 0.0)
    logits = queries @ rope.back(keys).transpose(2, 3)
    most = torch.maximum(logits.amax(dim=-1), rest)
    exps = logits.sub_(most[..., None]).exp_()
    mass, others = exps.sum(dim=-1), (rest - most).exp_()
    whole, before = mass + others, (exps @ kept[..., None].float())[..., 0] + others
    # Times `whole` and `before`: what all that a query saw gives, and what is left if nothing is corrected.
    beside = others[..., None] * output
    true, plain = exps @ values + beside, exps @ kept_values + beside

    places = _most_attended(exps, whole, kept, MOST_CORRECTED)
    valid = kept.gather(2, places)
    shares = exps.gather(3, places[:, :, None].expand(-1, -1, exps.shape[2], -1)) * valid[:, :, None]
    unchanged = before - others - shares.sum(dim=-1)
    weights = _weights(shares / whole[..., None], (mass - unchanged) / whole)
    own_keys, own_values = _rows(keys, places), _rows(kept_values, places)
    longer = torch.where(
        valid[..., None], own_keys + weights.log()[..., None] * rope.on(references.bias[:, None]), own_keys
    )

    logits = queries @ rope.back(stored(longer, places, keys, kept)).transpose(2, 3)
    logits.masked_fill_(~valid[:, :, None], -torch.inf)
    # Stored keys may lie beyond all true logits.
    higher = torch.maximum(most, logits.amax(dim=-1))
    fewer = (most - higher).exp()
    changed = logits.sub_(higher[..., None]).exp_()
    now = changed.sum(dim=-1) + (unchanged + others) * fewer
    changed /= now[..., None]
    true /= whole[..., None]
    gap = true - (plain - shares @ own_values) * (fewer / now)[..., None] - changed @ own_values
    gram = changed.transpose(2, 3) @ changed
    gram.diagonal(dim1=-2, dim2=-1).add_(VALUE_RIDGE * queries.shape[1])
    factor, _ = torch.linalg.cholesky_ex(gram)
    moved = torch.cholesky_solve(changed.transpose(2, 3) @ gap, factor)

    plain = true - plain / before[..., None]
    fits = (gap - changed @ moved).square().sum(dim=(-1, -2)) < plain.square().sum(dim=(-1, -2))
    fitted = own_values + moved
    fits &= fitted.abs().amax(dim=(-1, -2)) <= MOST_GROWTH * kept_values.abs().amax(dim=(-1, -2))
    fits = fits[..., None, None] & valid[..., None]
    return Corrections(places, torch.where(fits, longer, own_keys), torch.where(fits, fitted, _rows(values, places)))


def _rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows [segments, heads, n, d] of x [segments, heads, S, d] at places [segments, heads, n]."""
    return x.gather(2, places[..., None].expand(*places.shape, x.shape[-1]))


def _most_attended(exps: torch.Tensor, whole: torch.Tensor, kept: torch.Tensor, count: int) -> torch.Tensor:
    """The kept tokens with the largest shares of attention, then any others: int64 [segments, heads, count].

    Args:
        exps: [segments, heads, m, S]. whole: [segments, heads, m], what they are shares of. kept: bool [.., S].
    """
    shares = (whole.reciprocal()[..., None, :] @ exps)[..., 0, :].masked_fill(~kept, -1.0)
    return shares.argsort(dim=-1, descending=True, stable=True)[..., :count]


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
    linear = shares.transpose(-1, -2) @ wanted[..., None] + ridge
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
    return (now / unit).view(scale.shape)[..., 0]

"""Attention matching: what a head keeps of a segment is corrected so that it stands for all of it.

Source: "Attention Matching" (2602.16284): a bias per kept token so that the softmax mass fits, values so that the
output fits. Here per sealed segment and head, with queries of a codebook, the bias carried by the keys themselves, and
both measured against all that a query attends to: so a segment that is one of many has little to answer for.

Of a query with logits l over the segment: mass M = sum exp l, N = sum exp(l) v; R and o are mass and output of
everything else that it saw when it was recorded; D = M + R. All masses here are in units of R.

What is fitted is a difference: what dropped tokens had, and what corrections add. Both are summed by themselves; the
outputs with and without are never subtracted. So rounding stays in proportion to what is corrected, and processors that
sum in another order make nearly the same slab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from sgl_ragged.fitting.references import References

MASS_RIDGE, VALUE_RIDGE = 1e-6, 1e-5
"""Per query, in squared shares of attention: how much weights and values hold on to 1 and to what they were."""

COARSE_RIDGE = 3e-5
"""VALUE_RIDGE where keys have four bits: the format of the fewest bytes, in which few tokens stand for many."""

MOST_CORRECTED = 64
"""Of the tokens that a head keeps, how many are corrected: those that the codebook attends to most."""

MOST_KEPT = 3 / 4
"""Of a segment: heads that keep more have little to stand for, and are left as they are."""

MOST_GROWTH = 4.0
"""Fitted values are at most this many times as large as the largest kept one, or the head keeps its own."""

AT_ONCE_BYTES, AT_ONCE_BYTES_OF_DEVICES = 32 << 20, 96 << 20
"""Of exponentials that are held at a time; other intermediate results take two to three times as many. On CPUs more
would leave the caches, on other devices every further time costs the launches of all operations."""


@dataclass(frozen=True)
class Kept:
    """How many tokens of a segment heads keep: the first, by `rank_positions`.

    totals: int64 [heads, 1]. least, most: the smallest and the largest of them. own: bool [heads, most, 1], which of
    the first `most` each keeps; None where all heads keep as many. dropped: float32 [heads, S - least, 1], 1 for each
    token from rank `least` on that a head drops, else 0. ridge: how much values hold on to what they were, per query.
    """

    totals: torch.Tensor
    least: int
    most: int
    own: torch.Tensor | None
    dropped: torch.Tensor
    ridge: float

    @classmethod
    def of(cls, totals: Sequence[int], length: int, device: torch.device | str, ridge: float = VALUE_RIDGE) -> Kept:
        """length: S, tokens of a segment."""
        counts = torch.tensor(totals, dtype=torch.int64, device=device)[:, None]
        least, most = min(totals, default=0), max(totals, default=0)
        own = torch.arange(most, device=device) < counts
        dropped = (torch.arange(least, length, device=device) >= counts).float()
        return cls(counts, least, most, None if least == most else own[..., None], dropped[..., None], ridge)


class Steps(Protocol):
    """What is many small operations in torch (`torch_steps`), and one launch each where there are kernels for it."""

    def seen_from(self, references: References, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """`References.seen_from` of the last tokens of segments of `length` tokens, of their `numbers`, integers
        [segments], in their sequences."""

    def weights(self, exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
        """Weights of kept tokens with which they take over the attention that dropped ones had.

        Minimises, over w in [LEAST_WEIGHT, MOST_WEIGHT], sum (shares (w - 1) - missing)^2 + ridge |w - 1|^2, by
        projected Nesterov steps from w = 1 on variables scaled by the diagonal.

        Args:
            exps: float32 [..., kept, m]. whole: [..., 1, m]; exps / whole are the shares. lost: [..., 1, m], mass of
                dropped tokens; lost / whole is what is missing.

        Returns:
            [..., kept, 1].
        """

    def nearly_stored(
        self,
        rows: torch.Tensor,
        ranks: torch.Tensor | None,
        keys: torch.Tensor,
        kept: Kept,
        bits: int,
        centred: bool,
    ) -> torch.Tensor:
        """Rows of keys as codes of so many bits give them back, but for last bits; other arguments as in `Stored`.

        centred: whether codes are of keys less the mean of all that a head keeps, in units of their spread.
        """


Stored = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""What rows of keys [segments, heads, n, d] will be once they are stored, in place of those at ranks [segments, heads,
n] of the keys [segments, heads, most, d] of which heads keep their own; ranks None: in place of all."""


@dataclass(frozen=True)
class Corrections:
    """Rows of segments to be replaced before they are stored.

    ranks: int64 [segments, heads, n], which ones. keys, values: float32 [segments, heads, n, d]; where
    nothing is to be corrected, what was there.
    """

    ranks: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, parts: Sequence[Corrections]) -> Corrections:
        """Those of several runs of segments."""
        return cls(*(torch.cat([getattr(one, part.name) for one in parts]) for part in fields(cls)))


def corrections(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: Kept,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
    steps: Steps,
) -> Corrections:
    """Correct kept keys and values, MOST_CORRECTED of each head at most: those that are attended to most.

    Where the outputs of the codebook's queries would not come nearer, and where a value would grow beyond MOST_GROWTH,
    nothing is corrected.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE, of all tokens in the order of `rank_positions`: so what
            is kept is the first part of every product.
        numbers: integers [segments], the segments' numbers in their sequences.
        references: of these heads.
    """
    heads, _, queries = references.queries.shape
    at_once = max(1, at_once_bytes(keys.device) // bytes_per_segment(heads, queries, keys.shape[2]))
    split = (x.split(at_once) for x in (keys, values, numbers))
    parts = [_correct(k, v, kept, n, references, stored, steps) for k, v, n in zip(*split, strict=True)]
    return parts[0] if len(parts) == 1 else Corrections.of(parts)


def bytes_per_segment(heads: int, queries: int, length: int) -> int:
    """Of exponentials, of a segment of so many tokens."""
    return 4 * heads * queries * length


def at_once_bytes(device: torch.device) -> int:
    return AT_ONCE_BYTES if device.type == "cpu" else AT_ONCE_BYTES_OF_DEVICES


def _correct(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: Kept,
    numbers: torch.Tensor,
    references: References,
    stored: Stored,
    steps: Steps,
) -> Corrections:
    keys, values, length, most = keys.float(), values.float(), keys.shape[2], kept.most
    # The codebook's queries look back from each segment's last token.
    queries, bias, rest, output = steps.seen_from(references, numbers, length)
    # In units of what else a query saw: where exponentials overflow, the head keeps its own.
    exps = _logits(keys, queries, rest).exp_()

    kept_keys, kept_values, kept_exps = (x[:, :, :most] for x in (keys, values, exps))
    later, held_values = exps[:, :, kept.least :], kept_values if kept.own is None else kept_values * kept.own
    lost = kept.dropped.transpose(1, 2) @ later
    lost_outputs = (values[:, :, kept.least :] * kept.dropped).transpose(2, 3) @ later
    held_outputs = _plus(output, held_values, kept_exps)

    ranks, beside = None, 1.0
    mine, own_keys, own_values, valid = kept_exps, kept_keys, kept_values, kept.own
    if valid is not None:
        valid = valid.expand(*keys.shape[:2], -1, -1)
    if most > MOST_CORRECTED:
        others = torch.ones(most, 1, device=keys.device) if valid is None else valid.float()
        held = (others.transpose(-1, -2) @ kept_exps).add_(1.0)
        ranks = _most_attended(kept_exps, held + lost, kept)
        mine, own_keys, own_values = (_rows(x, ranks) for x in (exps, keys, values))
        valid = None if valid is None else valid.gather(2, ranks[..., None])
        others = others.expand(*keys.shape[:2], -1, -1).scatter(2, ranks[..., None], 0.0)
        beside = (others.transpose(2, 3) @ kept_exps).add_(1.0)
    if valid is not None:
        mine = mine * valid
    before = mine.sum(dim=2, keepdim=True).add_(beside)
    whole = before + lost
    weights = steps.weights(mine, whole, lost, MASS_RIDGE * references.count)
    longer = torch.addcmul(own_keys, weights.log(), bias)

    # Stored keys may lie beyond all true logits.
    further = (stored(longer, ranks, kept_keys) - own_keys) @ queries
    # exp x - 1 = tanh(x / 2) (exp x + 1): torch's expm1 takes several times as long.
    half, growth = torch.tanh(further / 2), further.exp_()
    added, changed = half.mul_(growth + 1).mul_(mine), growth.mul_(mine)
    now = changed.sum(dim=2, keepdim=True).add_(beside)
    more = added.sum(dim=2, keepdim=True).sub_(lost)
    # What the output lacks is lost_outputs / whole + held_outputs (1 / whole - 1 / now) - what `added` brings / now.
    gap = torch.addcmul(lost_outputs / whole, held_outputs, more / (whole * now))
    gap -= own_values.transpose(2, 3) @ added.div_(now)
    plain = torch.addcmul(lost_outputs / whole, held_outputs, lost / (whole * before), value=-1)
    changed /= now
    moved, left, failed = _ridge_regression(gap, changed, kept.ridge * references.count)

    fits = (_squares(left) < _squares(plain)) & (failed == 0)
    fitted = own_values + moved.transpose(2, 3)
    fits &= fitted.abs().amax(dim=(2, 3)) <= MOST_GROWTH * held_values.abs().amax(dim=(2, 3))
    fits = fits[..., None, None] if valid is None else fits[..., None, None] & valid
    if ranks is None:
        ranks = torch.arange(most, device=keys.device).expand(*keys.shape[:2], -1)
    return Corrections(ranks, torch.where(fits, longer, own_keys), torch.where(fits, fitted, own_values))


def _logits(keys: torch.Tensor, queries: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """float32 [..., S, m]: products of keys [..., S, d] and queries [..., d, m], less `rest`.

    On CPUs in float64, so that processors agree: errors of large logits come back many times over in what is fitted.
    """
    if keys.device.type == "cpu":
        return (keys.double() @ queries.double()).sub_(rest).float()
    return (keys @ queries).sub_(rest)


def _ridge_regression(
    wanted: torch.Tensor, shares: torch.Tensor, ridge: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Minimise |wanted - x shares|^2 + ridge |x|^2.

    By normal equations, refined once by what is left: those alone would square the condition number, and float32 has
    too few digits for that.

    Args:
        wanted: float32 [..., d, m]. shares: [..., n, m].

    Returns:
        x [..., d, n], refined; wanted - x shares [..., d, m], before that; integers [...], 0 where it succeeded.
    """
    across = shares.transpose(-1, -2)
    gram = shares @ across
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(gram)

    def solve(right: torch.Tensor) -> torch.Tensor:
        # From the right: LAPACK is several times slower from the left, at these sizes.
        half = torch.linalg.solve_triangular(factor.transpose(-1, -2), right, upper=True, left=False)
        return torch.linalg.solve_triangular(factor, half, upper=False, left=False)

    x = solve(wanted @ across)
    left = wanted - x @ shares
    return x + solve((left @ across).sub_(x, alpha=ridge)), left, failed


def _plus(x: torch.Tensor, values: torch.Tensor, exps: torch.Tensor) -> torch.Tensor:
    """x [.., d, m] plus what exponentials [.., n, m] of values [.., n, d] give."""
    summed = torch.baddbmm(x.flatten(0, 1), values.transpose(2, 3).flatten(0, 1), exps.flatten(0, 1))
    return summed.view(x.shape)


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares of matrices [.., n, m]: [..]."""
    return torch.linalg.vector_norm(x, dim=(-2, -1)).square()


def _rows(x: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Rows [segments, heads, n, c] of x [segments, heads, S, c] at ranks [segments, heads, n]: a copy."""
    firsts = torch.arange(0, x.shape[0] * x.shape[1] * x.shape[2], x.shape[2], device=x.device)
    index = firsts.view(*x.shape[:2], 1) + ranks
    return x.flatten(0, 2).index_select(0, index.flatten()).view(*ranks.shape, x.shape[3])


def _most_attended(exps: torch.Tensor, whole: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Of kept tokens, the MOST_CORRECTED with the largest shares of attention: int64 [segments, heads, MOST_CORRECTED].

    Args:
        exps: [segments, heads, most, m]. whole: [segments, heads, 1, m], what they are shares of.
    """
    shares = (whole.reciprocal() @ exps.transpose(2, 3))[..., 0, :]
    if kept.own is not None:
        shares = shares.masked_fill(~kept.own[..., 0], -1.0)
    return shares.argsort(dim=-1, descending=True, stable=True)[..., :MOST_CORRECTED]

"""Attention matching: correct the kept keys and values so that they approximate attention over the whole segment.

Each sealed segment and head is fitted with the queries of a codebook. The bias is added to the keys, and errors of mass
and output are weighed by all tokens that a query attends to, so that a segment with little attention changes little.

A query with logits l over the segment has mass M = sum exp l and numerator N = sum exp(l) v there. R and o are mass and
output of all other keys that it saw when it was recorded, and D = M + R. All masses here are in units of R.

The fit works on differences: the attention of dropped tokens, and the attention that corrections add. Each is summed
separately; outputs with and without corrections are never subtracted. So rounding errors are proportional to the
corrections, and processors that sum in different orders make nearly the same slab.

Source: "Attention Matching" (2602.16284), with a bias per kept token for the softmax mass and values for the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from sgl_ragged.fitting.references import References
from sgl_ragged.fitting.rounding import RoundedKeys, query_moments, round_keys, round_values
from sgl_ragged.mem_pool.quantise import Codes, RowCodes
from sgl_ragged.mem_pool.slab_format import SlabFormat

MASS_RIDGE, VALUE_RIDGE = 1e-6, 1e-5
"""Ridges per query, in squared shares of attention, that hold weights near 1 and values near the original ones."""

MOST_KEPT = 3 / 4
"""Maximum kept share of a segment for a fit in wide slabs, where heads that keep more lose little. In codes all heads
are fitted, since what rounding loses is made good, too."""

MOST_GROWTH = 4.0
"""Maximum size of fitted values, relative to the largest kept one; beyond it the head is not corrected."""

AT_ONCE_BYTES, AT_ONCE_BYTES_OF_DEVICES = 32 << 20, 96 << 20
"""Maximum bytes of exponentials at a time, on CPUs and on other devices; other intermediate results take two to three
times as much. On CPUs more would not fit in caches; on other devices each further part costs all launches again."""


@dataclass(frozen=True)
class Kept:
    """Numbers of tokens that heads keep of a segment, those before the dropped ones.

    Args:
        totals: int64 [heads, 1].
        least, most: smallest and largest of the totals.
        own: bool [heads, most, 1], whether the head keeps the token of this rank; None if all heads keep equally many.
        dropped: float32 [heads, S - least, 1], 1 for each token from rank `least` on that the head drops, else 0.
    """

    totals: torch.Tensor
    least: int
    most: int
    own: torch.Tensor | None
    dropped: torch.Tensor

    @classmethod
    def from_counts(cls, totals: Sequence[int], length: int, device: torch.device | str) -> Kept:
        """Make the tensors for kept counts, one per head.

        Args:
            length: tokens per segment S.
        """
        counts = torch.tensor(totals, dtype=torch.int64, device=device)[:, None]
        least, most = min(totals, default=0), max(totals, default=0)
        own = torch.arange(most, device=device) < counts
        dropped = (torch.arange(least, length, device=device) >= counts).float()
        return cls(counts, least, most, None if least == most else own[..., None], dropped[..., None])


class Steps(Protocol):
    """Steps that take many small operations in torch (`torch_steps`) and one launch each as kernels."""

    def seen_from(self, references: References, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """Rotate references to the last tokens of segments (`References.seen_from`).

        Args:
            numbers: integers [segments], the segments' numbers in their sequences.
            length: tokens per segment S.
        """

    def weights(self, exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
        """Compute weights of kept tokens with which they take over the attention of dropped tokens.

        Minimises sum (shares (w - 1) - missing)^2 + ridge |w - 1|^2 over w in [LEAST_WEIGHT, MOST_WEIGHT], with
        shares = exps / whole and missing = lost / whole, by projected Nesterov steps from w = 1 on variables scaled by
        the diagonal.

        Args:
            exps: float32 [..., kept, m], exponentials of kept tokens.
            whole: float32 [..., 1, m], mass of all tokens.
            lost: float32 [..., 1, m], mass of dropped tokens.

        Returns:
            float32 [..., kept, 1].
        """

    def feed_back(self, units: torch.Tensor, factor: torch.Tensor, bits: int) -> torch.Tensor:
        """Round numbers in order, each with the errors of those before it (`rounding.FeedBack`)."""


@dataclass(frozen=True)
class Corrections:
    """Corrected rows of segments, those that heads keep, n of them; the original ones where nothing is corrected.

    keys, values: float32 [segments, heads, n, d].
    codes: the same rows in codes; None for wide slabs.
    """

    keys: torch.Tensor
    values: torch.Tensor
    codes: RowCodes | None = None

    @classmethod
    def concatenate(cls, parts: Sequence[Corrections]) -> Corrections:
        """Concatenate the corrections of several runs of segments."""

        def joined(found: list[Any]) -> Any:
            first = found[0]
            if first is None or isinstance(first, torch.Tensor):
                return None if first is None else torch.cat(found)
            names = [field.name for field in fields(first)]
            return type(first)(*(joined([getattr(one, name) for one in found]) for name in names))

        return joined(list(parts))


def corrections(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: Kept,
    numbers: torch.Tensor,
    references: References,
    form: SlabFormat,
    rounded_keys: Callable[[torch.Tensor], torch.Tensor],
    steps: Steps,
) -> Corrections:
    """Correct the kept keys and values of each head.

    A head is not corrected if the outputs of the codebook's queries would not improve, or if a value would grow beyond
    MOST_GROWTH.

    Args:
        keys, values: [segments, heads, S, d], keys after RoPE, of all tokens, the kept ones of each head first.
        kept: kept counts of these heads.
        numbers: integers [segments], the segments' numbers in their sequences.
        references: codebook of these heads.
        form: format of slabs.
        rounded_keys: rounds keys, float32 of any shape, as wide slabs do.
        steps: `torch_steps`, or the kernels for the same steps.
    """
    heads, _, queries = references.queries.shape
    at_once = max(1, at_once_bytes(keys.device) // bytes_per_segment(heads, queries, keys.shape[2]))
    split = (x.split(at_once) for x in (keys, values, numbers))
    parts = [_correct(k, v, kept, n, references, form, rounded_keys, steps) for k, v, n in zip(*split, strict=True)]
    return parts[0] if len(parts) == 1 else Corrections.concatenate(parts)


def bytes_per_segment(heads: int, queries: int, length: int) -> int:
    """Compute the bytes of exponentials for one segment of `length` tokens."""
    return 4 * heads * queries * length


def at_once_bytes(device: torch.device) -> int:
    """Return the maximum bytes of exponentials at a time on a device."""
    return AT_ONCE_BYTES if device.type == "cpu" else AT_ONCE_BYTES_OF_DEVICES


def _correct(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: Kept,
    numbers: torch.Tensor,
    references: References,
    form: SlabFormat,
    rounded_keys: Callable[[torch.Tensor], torch.Tensor],
    steps: Steps,
) -> Corrections:
    keys, values, length, most = keys.float(), values.float(), keys.shape[2], kept.most
    # The codebook's queries look back from each segment's last token.
    queries, bias, rest, output = steps.seen_from(references, numbers, length)
    # Masses are in units of R. Exponentials that overflow fail the comparisons below, and nothing is corrected.
    exps = _logits(keys, queries, rest).exp_()

    kept_keys, kept_values, kept_exps = (x[:, :, :most] for x in (keys, values, exps))
    later, held_values = exps[:, :, kept.least :], kept_values if kept.own is None else kept_values * kept.own
    lost = kept.dropped.transpose(1, 2) @ later
    lost_outputs = (values[:, :, kept.least :] * kept.dropped).transpose(2, 3) @ later
    held_outputs = _add_outputs(output, held_values, kept_exps)
    own_exps = kept_exps if kept.own is None else kept_exps * kept.own
    kept_mass = own_exps.sum(dim=2, keepdim=True).add_(1.0)
    whole = kept_mass + lost
    weights = steps.weights(own_exps, whole, lost, MASS_RIDGE * references.count)
    biased_keys = torch.addcmul(kept_keys, weights.log(), bias)

    # Rounding may move a stored key's logits beyond all true ones, so the values are fitted to the stored keys.
    asked = key_codes = None
    if form.quantised:
        asked = query_moments(queries, 1 - whole.reciprocal())
        key_codes = round_keys(biased_keys, kept.own, asked, form, steps.feed_back)
        rounded = key_codes.decoded
    else:
        rounded = rounded_keys(biased_keys)
    if kept.own is not None:
        rounded = torch.where(kept.own, rounded, kept_keys)
    logit_changes = (rounded - kept_keys) @ queries
    # exp x - 1 = tanh(x / 2) (exp x + 1): torch's expm1 takes several times as long.
    half, growth = torch.tanh(logit_changes / 2), logit_changes.exp_()
    added, new_exps = half.mul_(growth + 1).mul_(own_exps), growth.mul_(own_exps)
    new_mass = new_exps.sum(dim=2, keepdim=True).add_(1.0)
    mass_change = added.sum(dim=2, keepdim=True).sub_(lost)
    # Error of the output: lost_outputs / whole + held_outputs (1 / whole - 1 / new_mass) - outputs of added / new_mass.
    error = torch.addcmul(lost_outputs / whole, held_outputs, mass_change / (whole * new_mass))
    error -= kept_values.transpose(2, 3) @ added.div_(new_mass)
    uncorrected_error = torch.addcmul(lost_outputs / whole, held_outputs, lost / (whole * kept_mass), value=-1)
    new_exps /= new_mass
    # Errors of values are fed back from tokens with the most weight to those with the least: here the last is first.
    order = new_exps.square().sum(dim=-1).argsort(dim=-1, stable=True)
    regression = _ridge_regression(error, _gather_rows(new_exps, order), VALUE_RIDGE * references.count)
    back = order.argsort(dim=-1)

    loss = _squares(uncorrected_error)
    if form.quantised:
        # Without corrections keys are rounded all the same.
        loss = torch.maximum(loss, _squares(error))
    solved = regression.failed == 0
    improves = (_squares(regression.residual) < loss) & solved
    fitted_values = kept_values + _gather_rows(regression.solution.transpose(2, 3), back)
    held = fitted_values if kept.own is None else fitted_values * kept.own
    improves &= held.abs().amax(dim=(2, 3)) <= MOST_GROWTH * held_values.abs().amax(dim=(2, 3))
    fits = improves[..., None, None] if kept.own is None else improves[..., None, None] & kept.own
    new_keys, new_values = torch.where(fits, biased_keys, kept_keys), torch.where(fits, fitted_values, kept_values)
    if key_codes is None or asked is None:
        return Corrections(new_keys, new_values)
    if not (keys.device.type == "cpu" and improves.all()):
        plain = round_keys(kept_keys, kept.own, asked, form, steps.feed_back)
        key_codes = _choose_keys(improves, key_codes, plain)
    in_order = _gather_rows(new_values, order)
    values_in_order = round_values(in_order, regression.factor, solved, form.value_bits, steps.feed_back)
    value_codes = Codes(
        _gather_rows(values_in_order.codes, back), _gather_rows(values_in_order.scales[..., None], back)[..., 0]
    )
    return Corrections(new_keys, new_values, RowCodes(key_codes.codes, value_codes, key_codes.moments))


def _choose_keys(chosen: torch.Tensor, one: RoundedKeys, other: RoundedKeys) -> RoundedKeys:
    """Take the heads of `one` where chosen, bool [segments, heads], else those of the other."""
    wide = chosen[..., None, None]
    codes = Codes(
        torch.where(wide, one.codes.codes, other.codes.codes),
        torch.where(chosen[..., None], one.codes.scales, other.codes.scales),
    )
    moments = None
    if one.moments is not None and other.moments is not None:
        moments = torch.where(wide, one.moments, other.moments)
    return RoundedKeys(codes, moments, torch.where(wide, one.decoded, other.decoded))


def _logits(keys: torch.Tensor, queries: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Multiply keys [..., S, d] and queries [..., d, m] and subtract `rest`: float32 [..., S, m].

    On CPUs the product is in float64, so that processors agree: the fit amplifies errors of large logits.
    """
    if keys.device.type == "cpu":
        return (keys.double() @ queries.double()).sub_(rest).float()
    return (keys @ queries).sub_(rest)


@dataclass(frozen=True)
class _Regression:
    """Result of a ridge regression.

    solution: x [..., d, n], refined. residual: target - x shares [..., d, m] before the refinement.
    factor: Cholesky factor [..., n, n] of the normal equations. failed: integers [...], 0 for success.
    """

    solution: torch.Tensor
    residual: torch.Tensor
    factor: torch.Tensor
    failed: torch.Tensor


def _ridge_regression(target: torch.Tensor, shares: torch.Tensor, ridge: float) -> _Regression:
    """Minimise |target - x shares|^2 + ridge |x|^2.

    Normal equations square the condition number, for which float32 has too few digits. So the solution is refined once
    with its residual.

    Args:
        target: float32 [..., d, m].
        shares: float32 [..., n, m].
    """
    transposed = shares.transpose(-1, -2)
    gram = shares @ transposed
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(gram)

    def solve(right: torch.Tensor) -> torch.Tensor:
        # At these sizes LAPACK is several times slower from the left.
        half = torch.linalg.solve_triangular(factor.transpose(-1, -2), right, upper=True, left=False)
        return torch.linalg.solve_triangular(factor, half, upper=False, left=False)

    x = solve(target @ transposed)
    residual = target - x @ shares
    refined = x + solve((residual @ transposed).sub_(x, alpha=ridge))
    return _Regression(refined, residual, factor, failed)


def _add_outputs(x: torch.Tensor, values: torch.Tensor, exps: torch.Tensor) -> torch.Tensor:
    """Add to x [.., d, m] the sum of values [.., n, d] multiplied by exponentials [.., n, m]."""
    summed = torch.baddbmm(x.flatten(0, 1), values.transpose(2, 3).flatten(0, 1), exps.flatten(0, 1))
    return summed.view(x.shape)


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Sum the squares of matrices [.., n, m]: [..]."""
    return torch.linalg.vector_norm(x, dim=(-2, -1)).square()


def _gather_rows(x: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Copy the rows of x [segments, heads, S, c] at ranks [segments, heads, n]: [segments, heads, n, c]."""
    x = x.contiguous()
    firsts = torch.arange(0, x.shape[0] * x.shape[1] * x.shape[2], x.shape[2], device=x.device)
    index = firsts.view(*x.shape[:2], 1) + ranks
    return x.flatten(0, 2).index_select(0, index.flatten()).view(*ranks.shape, x.shape[3])

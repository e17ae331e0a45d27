"""Error curves: how far what a head keeps, as fitted, leaves what it adds to the residual stream.

Coverage sees the peaks of attention, and not what they are worth: some heads attend widely and add little, of others
fitting brings back nearly all. So the same queries are answered from kept tokens, and the change of the residual stream
is measured, as a share of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.attention_matching import MOST_KEPT, Kept, corrections
from sgl_ragged.fitting.references import References
from sgl_ragged.profiles.budgets import UNIT

SHARES = (1 / 16, 3 / 16, 6 / 16, 10 / 16, 14 / 16)
"""Of a segment's tokens, at which errors are measured; between them, logarithms are interpolated."""

QUERIES = 256
"""Of a sample, evenly over what lies behind its first segment."""

LAST_FALL = 3.0
"""How much the logarithm of an error falls from the last share to the whole segment, where it is none: for curves that
can be interpolated up to there."""


Added = Callable[[torch.Tensor], torch.Tensor]
"""From a change of attention's outputs [Q, heads * d] to what it adds to the residual stream, [Q, hidden size]."""


def kept_counts(segment: int) -> tuple[int, ...]:
    """Tokens of a segment at which errors are measured, ascending multiples of UNIT, fewer than all."""
    units = {min(max(round(share * segment / UNIT), 1), segment // UNIT - 1) for share in SHARES}
    return tuple(UNIT * unit for unit in sorted(units))


def query_positions(length: int, segment: int) -> torch.Tensor | None:
    """int64: tokens behind the first segment of a sample whose queries are answered; None if there are none."""
    return torch.arange(segment, length, max(1, (length - segment) // QUERIES)) if length > segment else None


def left_over(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    ranked: torch.Tensor,
    references: References | None,
    behind: Callable[[torch.Tensor], tuple[Added, torch.Tensor]],
) -> torch.Tensor:
    """float32 [heads, counts]: mean squared change of the residual stream / its square, by tokens that are kept.

    One head at a time keeps that many tokens of every finished segment; queries see all of their own segment.

    Args:
        queries: float32 [Q, heads, q_per_kv, d] after RoPE, times the scale; of the tokens at `positions`, int64 [Q].
        keys, values: float32 [heads, tokens, d].
        ranked: int64 [segments, heads, S], `rank_positions` of the finished segments.
        references: by which what is kept is fitted, or None.
        behind: as `ResidualStream.behind`.
    """
    segments, heads, segment = ranked.shape
    count, per_head, finished = len(positions), queries.shape[2], segments * segment
    tokens = torch.arange(keys.shape[1], device=keys.device)
    past = tokens < (positions[:, None] // segment * segment)
    own = ~past & (tokens <= positions[:, None])
    logits = torch.einsum("qhgd,htd->hgqt", queries, keys)
    weights = logits.masked_fill(~(past | own), -torch.inf).softmax(dim=-1)
    outputs = torch.einsum("hgqt,htd->qhgd", weights, values)
    added, squares = behind(outputs.flatten(1))
    del weights
    index = ranked[..., None].expand(*ranked.shape, keys.shape[2])
    whole_keys, whole_values = (
        x[:, :finished].unflatten(1, (segments, segment)).transpose(0, 1).gather(2, index) for x in (keys, values)
    )
    segment_indices = torch.arange(segments, device=keys.device)
    found = torch.empty(heads, len(kept_counts(segment)), device=keys.device)
    for column, kept_count in enumerate(kept_counts(segment)):
        new = whole_keys, whole_values
        if references is not None and kept_count <= MOST_KEPT * segment:
            kept = Kept.of([kept_count] * heads, segment, keys.device)
            whole = whole_keys, whole_values
            fitted = corrections(*whole, kept, segment_indices, references, lambda rows, *_: rows, torch_steps)
            corrected = fitted.ranks[..., None].expand_as(fitted.keys)
            new = whole_keys.scatter(2, corrected, fitted.keys), whole_values.scatter(2, corrected, fitted.values)
        # Of what is kept of every segment.
        kept_keys, kept_values = (x[:, :, :kept_count].transpose(0, 1).flatten(1, 2) for x in new)
        before = segment_indices.repeat_interleave(kept_count) < positions[:, None] // segment
        for head in range(heads):
            behind = (queries[:, head].transpose(0, 1) @ kept_keys[head].T).masked_fill(~before, -torch.inf)
            shares = torch.cat([behind, logits[head].masked_fill(~own, -torch.inf)], dim=-1).softmax(dim=-1)
            answer = shares @ torch.cat([kept_values[head], values[head]])
            change = torch.zeros(count, heads, per_head, keys.shape[2], device=keys.device)
            change[:, head] = answer.transpose(0, 1) - outputs[:, head]
            found[head, column] = (added(change.flatten(1)).square().sum(dim=-1) / squares).mean()
    return found


def error_curves(errors: np.ndarray, segment: int) -> np.ndarray:
    """float64 [layers, heads, S / 16]: errors at 16, 32, .. tokens, never rising, none where all are kept.

    Args:
        errors: [layers, heads, counts], means over samples.
    """
    counts, every = np.array(kept_counts(segment)), np.arange(UNIT, segment + 1, UNIT)
    logs = np.minimum.accumulate(np.log(np.maximum(errors.astype(np.float64), 1e-12)), axis=-1)
    logs = np.concatenate([logs, logs[..., -1:] - LAST_FALL], axis=-1)
    curves = np.exp(np.apply_along_axis(lambda one: np.interp(every, [*counts, segment], one), -1, logs))
    curves[..., -1] = 0.0
    return curves


def weighed(coverage: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Coverage curves [layers, heads, S / 16] whose steps are geometric means of coverage's and of the errors'.

    Each alone is worse on one of two models that were measured (docs/calibration.md).

    Args:
        errors: `error_curves`.
    """
    covered = np.maximum(np.diff(coverage, axis=-1), 0.0)
    steps = np.sqrt(covered * -np.diff(errors, axis=-1))
    # The first sixteen are everybody's; curves of longer segments are read in between, and do not start flat.
    return np.cumsum(np.concatenate([steps[..., :1], steps], axis=-1), axis=-1)

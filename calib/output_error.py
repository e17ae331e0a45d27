"""Error curves: change of the residual stream if a head attends to its kept tokens, fitted, instead of all tokens.

Coverage counts attention, not its effect: some heads attend widely and add little to the residual stream, and fitting
restores nearly all that others add. So the same queries are answered from kept tokens, and the squared change of the
residual stream is measured, as a share of the stream's square.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.attention_matching import MOST_KEPT, Kept, corrections
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.slab_format import WIDE
from sgl_ragged.profiles.budgets import UNIT

SHARES = (1 / 16, 3 / 16, 6 / 16, 10 / 16, 14 / 16)
"""Kept shares of a segment at which errors are measured; between them, the errors' logarithms are interpolated."""

QUERIES = 256
"""Number of queries per sample, spread evenly over the tokens after the first segment."""

LAST_FALL = 3.0
"""Assumed fall of an error's logarithm from the last share to the whole segment. There the error is 0 and has no
logarithm, but curves are interpolated up to it."""


Added = Callable[[torch.Tensor], torch.Tensor]
"""Maps a change of attention's outputs [Q, heads * d] to the change of the residual stream [Q, hidden size]."""


def kept_counts(segment: int) -> tuple[int, ...]:
    """Return the kept counts at which errors are measured: ascending multiples of UNIT, less than the segment."""
    units = {min(max(round(share * segment / UNIT), 1), segment // UNIT - 1) for share in SHARES}
    return tuple(UNIT * unit for unit in sorted(units))


def query_positions(length: int, segment: int) -> torch.Tensor | None:
    """Choose tokens after a sample's first segment whose queries are answered: int64 [Q], None if there are none."""
    return torch.arange(segment, length, max(1, (length - segment) // QUERIES)) if length > segment else None


def left_over(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    ranked: torch.Tensor,
    references: References | None,
    after_attention: Callable[[torch.Tensor], tuple[Added, torch.Tensor]],
) -> torch.Tensor:
    """Measure the mean squared change of the residual stream, divided by its square, at each kept count.

    One head at a time keeps that many tokens of every finished segment; queries see all of their own segment.

    Args:
        queries: float32 [Q, heads, q_per_kv, d] after RoPE, multiplied by the scale.
        keys, values: float32 [heads, tokens, d].
        positions: int64 [Q], the queries' tokens.
        ranked: int64 [segments, heads, S], `rank_positions` of the finished segments.
        references: codebook by which kept tokens are fitted; None for no fit.
        after_attention: `ResidualStream.after_attention`.

    Returns:
        float32 [heads, counts], one column for each of `kept_counts`.
    """
    segments, heads, segment = ranked.shape
    num_queries, q_per_kv, finished = len(positions), queries.shape[2], segments * segment
    tokens = torch.arange(keys.shape[1], device=keys.device)
    past = tokens < (positions[:, None] // segment * segment)
    own = ~past & (tokens <= positions[:, None])
    logits = torch.einsum("qhgd,htd->hgqt", queries, keys)
    weights = logits.masked_fill(~(past | own), -torch.inf).softmax(dim=-1)
    outputs = torch.einsum("hgqt,htd->qhgd", weights, values)
    added, squares = after_attention(outputs.flatten(1))
    del weights
    index = ranked[..., None].expand(*ranked.shape, keys.shape[2])
    ranked_keys, ranked_values = (
        x[:, :finished].unflatten(1, (segments, segment)).transpose(0, 1).gather(2, index) for x in (keys, values)
    )
    segment_indices = torch.arange(segments, device=keys.device)
    errors = torch.empty(heads, len(kept_counts(segment)), device=keys.device)
    for column, kept_count in enumerate(kept_counts(segment)):
        rows = ranked_keys, ranked_values
        if references is not None and kept_count <= MOST_KEPT * segment:
            kept = Kept.from_counts([kept_count] * heads, segment, keys.device)
            fitted = corrections(*rows, kept, segment_indices, references, WIDE, lambda keys: keys, torch_steps)
            rows = fitted.keys, fitted.values
        # Kept rows of all segments in a row, [heads, segments * kept_count, d].
        kept_keys, kept_values = (x[:, :, :kept_count].transpose(0, 1).flatten(1, 2) for x in rows)
        earlier = segment_indices.repeat_interleave(kept_count) < positions[:, None] // segment
        for head in range(heads):
            kept_logits = (queries[:, head].transpose(0, 1) @ kept_keys[head].T).masked_fill(~earlier, -torch.inf)
            own_logits = logits[head].masked_fill(~own, -torch.inf)
            shares = torch.cat([kept_logits, own_logits], dim=-1).softmax(dim=-1)
            answer = shares @ torch.cat([kept_values[head], values[head]])
            change = torch.zeros(num_queries, heads, q_per_kv, keys.shape[2], device=keys.device)
            change[:, head] = answer.transpose(0, 1) - outputs[:, head]
            errors[head, column] = (added(change.flatten(1)).square().sum(dim=-1) / squares).mean()
    return errors


def error_curves(errors: np.ndarray, segment: int) -> np.ndarray:
    """Interpolate errors to 16, 32, .. kept tokens: float64 [layers, heads, S / 16], never rising, 0 at the last point.

    Args:
        errors: [layers, heads, counts], means over samples.
    """
    counts, points = np.array(kept_counts(segment)), np.arange(UNIT, segment + 1, UNIT)
    logs = np.minimum.accumulate(np.log(np.maximum(errors.astype(np.float64), 1e-12)), axis=-1)
    logs = np.concatenate([logs, logs[..., -1:] - LAST_FALL], axis=-1)
    curves = np.exp(np.apply_along_axis(lambda row: np.interp(points, [*counts, segment], row), -1, logs))
    curves[..., -1] = 0.0
    return curves


def weighed(coverage: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Weigh coverage curves by error curves: each step is the geometric mean of the two curves' steps.

    Either curve alone is worse on one of two measured models (docs/calibration.md).

    Args:
        coverage: [layers, heads, S / 16].
        errors: [layers, heads, S / 16], from `error_curves`.

    Returns:
        float64 [layers, heads, S / 16].
    """
    covered = np.maximum(np.diff(coverage, axis=-1), 0.0)
    steps = np.sqrt(covered * -np.diff(errors, axis=-1))
    # Every head keeps the first 16 tokens. Their step repeats the second one, so that curves read for longer segments
    # do not start flat.
    return np.cumsum(np.concatenate([steps[..., :1], steps], axis=-1), axis=-1)

"""Roles of heads: stability, similarity, and foresight of the attention of later heads.

Stability and similarity are HeteroCache's (Eq. 1 to 6, appendix C). They compare sets of the COMPARED tokens that a
head attends to most, here in windows of a few queries, by the largest attention of a single query. Foresight is our own
measure, for pivots in serving (`sgl_ragged.features.retrieval.roles`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from calib.attended import ANSWERING, ATTENDED_WINDOW, STARTS, TOKENS, WEIGHTS
from calib.coverage import coverage_curves
from sgl_ragged.profiles.budgets import coverage_kept
from sgl_ragged.profiles.head_statistics import (
    DROPPED,
    OVERLAP,
    PIVOT_ORDER,
    PIVOTS,
    ROLE,
    ROLES,
    SIMILARITY,
    STABILITY,
    WATCHED,
)
from sgl_ragged.scorers import rank_positions

COMPARED = 64
"""Number of tokens in the compared sets, k of Eq. 1."""

DROPPED_AT = 0.1
"""Ratio at which foresight is measured: heads keep this share of the tokens and drop the rest."""

TAU_STABLE, TAU_SIM = 0.5, 0.5
"""The paper's thresholds."""

VOLATILE, ANCHOR, PIVOT, SATELLITE = range(len(ROLES))


@dataclass(frozen=True)
class Kinship:
    """Comparison of heads in one sample. Arrays are float32.

    Args:
        stability: [layers, heads], Eq. 2.
        similarity: [layers, heads], Eq. 3.
        overlap: [layers, heads, heads], median over windows of Eq. 1 between heads of a layer; 1 on the diagonal.
    """

    stability: np.ndarray
    similarity: np.ndarray
    overlap: np.ndarray


@dataclass(frozen=True)
class Foresight:
    """Foresight of heads, summed over windows and samples. Arrays are float64, over the n heads of all layers in a row.

    Args:
        foreseen: [n, n], U[p, s]: attention of s in a window to tokens that s drops and that are among the COMPARED
            tokens that p attends to most, in the same window and again in the window before. A prompt's last tokens
            see the tokens that they look for themselves, later ones see those that earlier tokens looked for.
        dropped: [n], attention of s to all recorded tokens that it drops, counted once per comparison in `foreseen`.
        windows: number of windows, counted once per comparison.
    """

    foreseen: np.ndarray
    dropped: np.ndarray
    windows: int


def overlaps(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Compute the overlap coefficient of all pairs of sets (HeteroCache Eq. 1); 0 if a set is empty.

    Args:
        rows: bool [..., n, tokens], sets of tokens.
        columns: bool [..., m, tokens].

    Returns:
        float32 [..., n, m].
    """
    common = rows.float() @ columns.float().transpose(-1, -2)
    sizes = torch.minimum(rows.sum(dim=-1)[..., :, None], columns.sum(dim=-1)[..., None, :])
    return common / sizes.clamp_min(1)


def compare_heads(recording: Mapping[str, torch.Tensor]) -> Kinship | None:
    """Measure stability and similarity in one sample; None if it has fewer than two windows.

    Samples are prefilled and nothing is decoded. So the first recorded window takes the place of the prompt's last
    query in Eq. 2, and later windows that of decoding steps.
    """
    tokens = recording[TOKENS]
    if tokens.shape[2] < 2:
        return None
    num_tokens = int(tokens.max()) + 1
    stability, similarity, overlap = [], [], []
    for layer in tokens[..., :COMPARED]:
        sets = _to_masks(layer, num_tokens)
        stability.append(_median(overlaps(sets[:, 1:], sets[:, :1])[..., 0], dim=1))
        pairs = overlaps(sets.transpose(0, 1), sets.transpose(0, 1))
        other_heads = pairs.masked_fill(torch.eye(len(layer), dtype=torch.bool), 0.0)
        similarity.append(_median(other_heads.amax(dim=-1), dim=0))
        overlap.append(_median(pairs, dim=0))
    return Kinship(*(torch.stack(layers).numpy() for layers in (stability, similarity, overlap)))


def foresee(recordings: Sequence[Mapping[str, torch.Tensor]], scorer: str, queries: str) -> Foresight:
    """Measure U[p, s] for all pairs of heads, if every head keeps its best tokens at ratio DROPPED_AT.

    Args:
        recordings: one per sample, with the scorer's scores and the queries' peaks, from which budgets are made.
        scorer: scorer that ranks the tokens.
        queries: "answers" for windows that generate answers, or "all".
    """
    layers, heads = recordings[0][TOKENS].shape[:2]
    curves = [coverage_curves(r[f"{scorer}.scores"], r[f"peaks.{queries}"]).double() for r in recordings]
    segment = recordings[0][f"{scorer}.scores"].shape[-1]
    budgets = torch.from_numpy(coverage_kept(torch.cat(curves).mean(dim=0).numpy(), DROPPED_AT, segment))
    foreseen = torch.zeros((layers * heads, layers * heads), dtype=torch.float64)
    dropped, windows = torch.zeros(layers * heads, dtype=torch.float64), 0
    for recording in recordings:
        kept = kept_tokens(recording[f"{scorer}.scores"], budgets).flatten(0, 1)
        num_tokens = kept.shape[1]
        tokens, weights = (recording[name].flatten(0, 1) for name in (TOKENS, WEIGHTS))
        starts = recording[STARTS].tolist()
        counted = recording[ANSWERING].tolist() if queries == "answers" else [True] * len(starts)
        for window in np.flatnonzero(counted).tolist():
            missed = _scatter(tokens[:, window], weights[:, window], num_tokens).masked_fill(kept, 0.0)
            has_previous = window > 0 and starts[window - 1] == starts[window] - ATTENDED_WINDOW
            for watching in (window, window - 1) if has_previous else (window,):
                watched = _to_masks(tokens[:, watching, :COMPARED], num_tokens).float()
                foreseen += (watched @ missed.T).double()
                dropped += missed.sum(dim=1).double()
                windows += 1
    return Foresight(foreseen.numpy(), dropped.numpy(), windows)


def kept_tokens(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    """Mark the tokens that heads keep.

    Args:
        scores: float [segments, layers, heads, S]; segment 0 starts the sequence.
        budgets: int64 [layers, heads], tokens kept per segment.

    Returns:
        bool [layers, heads, segments * S].
    """
    order = rank_positions(scores.flatten(1, 2), torch.arange(len(scores)) == 0)
    ranks = order.argsort(dim=-1).view(scores.shape)
    return (ranks < budgets[..., None]).permute(1, 2, 0, 3).flatten(2)


def rank_pivots(foreseen: np.ndarray, layer: np.ndarray, count: int) -> list[int]:
    """Choose heads that together foresee most: greedily maximise the sum over s of max over p of U[p, s] (facility
    location).

    A head foresees for heads of its own layer and of later ones.

    Args:
        foreseen: float [n, n], U[p, s].
        layer: integers [n], the layer of each head.
        count: maximum number of heads; the choice ends early when no head adds anything.

    Returns:
        Numbers of the heads, best first; ties go to the earlier head.
    """
    reached = np.where(layer[:, None] <= layer, foreseen, 0.0)
    covered, chosen = np.zeros(len(layer)), []
    for _ in range(count):
        gains = np.maximum(reached - covered, 0.0).sum(axis=1)
        best = int(gains.argmax())
        if gains[best] <= 0:
            break
        chosen.append(best)
        covered = np.maximum(covered, reached[best])
    return chosen


def assign_roles(stability: np.ndarray, overlap: np.ndarray, tau_stable: float, tau_sim: float) -> np.ndarray:
    """Assign roles by greedy star clustering of similar heads within each layer (HeteroCache Eq. 4 to 6, appendix C.2).

    The head with most neighbours without a role becomes a pivot and these neighbours its satellites, and so on; ties go
    to the earlier head. Remaining heads, which resemble no head or satellites only, are anchors or volatile.

    Args:
        stability: float [layers, heads]; remaining heads are anchors if it is at least `tau_stable`.
        overlap: float [layers, heads, heads]; heads are neighbours if it is at least `tau_sim`.

    Returns:
        int64 [layers, heads], indices into ROLES.
    """
    roles = np.where(stability >= tau_stable, ANCHOR, VOLATILE)
    for layer, pairs in enumerate(overlap):
        neighbours = (pairs >= tau_sim) & ~np.eye(len(pairs), dtype=bool)
        free = np.ones(len(pairs), dtype=bool)
        while True:
            degrees = (neighbours & free).sum(axis=1) * free
            pivot = int(degrees.argmax())
            if degrees[pivot] == 0:
                break
            satellites = neighbours[pivot] & free
            roles[layer, satellites], roles[layer, pivot] = SATELLITE, PIVOT
            free &= ~satellites
            free[pivot] = False
    return roles


def head_statistics(
    recordings: Sequence[Mapping[str, torch.Tensor]], scorer: str, queries: str, tau_stable: float, tau_sim: float
) -> dict[str, torch.Tensor]:
    """Measure HEAD_STATISTICS for a scorer: means over samples, zeros if all samples are too short.

    Args:
        recordings, scorer, queries: as in `foresee`.
        tau_stable, tau_sim: as in `assign_roles`.
    """
    layers, heads = recordings[0][TOKENS].shape[:2]
    kinships = [kinship for kinship in map(compare_heads, recordings) if kinship is not None]
    if not kinships:
        kinships = [Kinship(np.zeros((layers, heads)), np.zeros((layers, heads)), np.zeros((layers, heads, heads)))]
    stability, similarity, overlap = (
        np.mean([getattr(kinship, name) for kinship in kinships], axis=0).astype(np.float32)
        for name in ("stability", "similarity", "overlap")
    )
    foresight = foresee(recordings, scorer, queries)
    layer = np.repeat(np.arange(layers), heads)
    pivots = rank_pivots(foresight.foreseen, layer, PIVOTS)
    order, watched = np.full(layers * heads, -1.0), np.zeros((layers * heads, PIVOTS))
    for number, pivot in enumerate(pivots):
        order[pivot] = number
        share = foresight.foreseen[pivot] / np.maximum(foresight.dropped, 1e-30)
        watched[:, number] = np.where(layer[pivot] <= layer, share, 0.0)
    arrays = {
        STABILITY: stability,
        SIMILARITY: similarity,
        OVERLAP: overlap,
        ROLE: assign_roles(stability, overlap, tau_stable, tau_sim),
        PIVOT_ORDER: order.reshape(layers, heads),
        WATCHED: watched.reshape(layers, heads, PIVOTS),
        DROPPED: (foresight.dropped / max(foresight.windows, 1)).reshape(layers, heads),
    }
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}


def _to_masks(tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Convert sets of tokens [..., k], -1 for unused entries, to masks bool [..., num_tokens]."""
    return _scatter(tokens, torch.ones(tokens.shape), num_tokens) > 0


def _scatter(tokens: torch.Tensor, values: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Write values [..., k] at their tokens [..., k], -1 for unused entries, into zeros float32 [..., num_tokens]."""
    # Unused entries go to one more column, which is cut off.
    padded = torch.zeros((*tokens.shape[:-1], num_tokens + 1))
    indices = torch.where(tokens < 0, num_tokens, tokens).long()
    return padded.scatter_(-1, indices, values.float())[..., :num_tokens]


def _median(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute the median, which for an even number of values is the mean of the middle two."""
    return values.quantile(0.5, dim=dim)

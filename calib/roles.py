"""Roles of heads: which are stable, which resemble each other, and which foresee what others will attend to.

The first two are HeteroCache's (Eq. 1 to 6, appendix C): sets of the COMPARED tokens that a head attends to most, here
in windows of a few queries, by the largest attention that one of them pays. The third is our own, for heads that watch
for others: pivots in serving (`sgl_ragged.features.retrieval.roles`).
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
"""Tokens in the sets that are compared, k of Eq. 1: what a head attends to most in a window."""

DROPPED_AT = 0.1
"""Ratio at which heads drop what others are to foresee."""

TAU_STABLE, TAU_SIM = 0.5, 0.5
"""The paper's thresholds."""

VOLATILE, ANCHOR, PIVOT, SATELLITE = range(len(ROLES))


@dataclass(frozen=True)
class Kinship:
    """How heads compare in one sample. float32.

    stability [layers, heads] (Eq. 2), similarity [layers, heads] (Eq. 3), overlap [layers, heads, heads]: median over
    windows of Eq. 1 between heads of a layer, 1 with themselves.
    """

    stability: np.ndarray
    similarity: np.ndarray
    overlap: np.ndarray


@dataclass(frozen=True)
class Foresight:
    """Foresight of heads, summed over windows and samples. float64; n heads of all layers in a row.

    foreseen [n, n]: U[p, s], attention of s in a window to tokens that s drops and that are among the COMPARED that p
        attends to most in the same window, and once more, of those that it attended to in the window before: a prompt's
        last tokens see what they ask for themselves, later ones what was asked for before.
    dropped [n]: attention of s to all the tokens that it drops, of those that were recorded, counted as often.
    windows: over how many windows, counted as often.
    """

    foreseen: np.ndarray
    dropped: np.ndarray
    windows: int


def overlaps(sets: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Overlap coefficient of each of `sets` with each of `others`: HeteroCache Eq. 1; 0 where one is empty.

    Args:
        sets: bool [..., n, tokens]; others: bool [..., m, tokens].

    Returns:
        float32 [..., n, m].
    """
    common = sets.float() @ others.float().transpose(-1, -2)
    sizes = torch.minimum(sets.sum(dim=-1)[..., :, None], others.sum(dim=-1)[..., None, :])
    return common / sizes.clamp_min(1)


def compare_heads(recording: Mapping[str, torch.Tensor]) -> Kinship | None:
    """Stability and similarity in one sample; None if it has fewer than two windows.

    The reference of Eq. 2, in the paper what the prompt's last query attends to, is the first recorded window, and the
    later ones are its decoding steps: samples are prefilled, nothing is decoded.
    """
    tokens = recording[TOKENS]
    if tokens.shape[2] < 2:
        return None
    size = int(tokens.max()) + 1
    stability, similarity, overlap = [], [], []
    for layer in tokens[..., :COMPARED]:
        sets = _members(layer, size)
        stability.append(_median(overlaps(sets[:, 1:], sets[:, :1])[..., 0], dim=1))
        pairs = overlaps(sets.transpose(0, 1), sets.transpose(0, 1))
        others = pairs.masked_fill(torch.eye(len(layer), dtype=torch.bool), 0.0)
        similarity.append(_median(others.amax(dim=-1), dim=0))
        overlap.append(_median(pairs, dim=0))
    return Kinship(*(torch.stack(found).numpy() for found in (stability, similarity, overlap)))


def foresee(recordings: Sequence[Mapping[str, torch.Tensor]], scorer: str, queries: str) -> Foresight:
    """U[p, s] of all pairs of heads, where every head keeps what the scorer ranks best at DROPPED_AT.

    Args:
        recordings: with X.scores of the scorer and peaks of the queries, from which budgets at that ratio are made.
        queries: `answers` for windows that generate answers alone, or `all`.
    """
    layers, heads = recordings[0][TOKENS].shape[:2]
    curves = [coverage_curves(r[f"{scorer}.scores"], r[f"peaks.{queries}"]).double() for r in recordings]
    segment = recordings[0][f"{scorer}.scores"].shape[-1]
    budgets = torch.from_numpy(coverage_kept(torch.cat(curves).mean(dim=0).numpy(), DROPPED_AT, segment))
    foreseen = torch.zeros((layers * heads, layers * heads), dtype=torch.float64)
    dropped, windows = torch.zeros(layers * heads, dtype=torch.float64), 0
    for recording in recordings:
        kept = kept_tokens(recording[f"{scorer}.scores"], budgets).flatten(0, 1)
        size = kept.shape[1]
        tokens, weights = (recording[name].flatten(0, 1) for name in (TOKENS, WEIGHTS))
        starts = recording[STARTS].tolist()
        counts = recording[ANSWERING].tolist() if queries == "answers" else [True] * len(starts)
        for place in np.flatnonzero(counts).tolist():
            missed = _spread(tokens[:, place], weights[:, place], size).masked_fill(kept, 0.0)
            follows = place > 0 and starts[place - 1] == starts[place] - ATTENDED_WINDOW
            for asked in (place, place - 1) if follows else (place,):
                named = _members(tokens[:, asked, :COMPARED], size).float()
                foreseen += (named @ missed.T).double()
                dropped += missed.sum(dim=1).double()
                windows += 1
    return Foresight(foreseen.numpy(), dropped.numpy(), windows)


def kept_tokens(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    """Which tokens heads keep: bool [layers, heads, segments * S].

    Args:
        scores: float [segments, layers, heads, S]; segment 0 starts the sequence.
        budgets: int64 [layers, heads], tokens kept per segment.
    """
    order = rank_positions(scores.flatten(1, 2), torch.arange(len(scores)) == 0)
    ranks = order.argsort(dim=-1).view(scores.shape)
    return (ranks < budgets[..., None]).permute(1, 2, 0, 3).flatten(2)


def rank_pivots(foreseen: np.ndarray, layer: np.ndarray, count: int) -> list[int]:
    """Heads that together foresee most: the greedy choice for sum over s of max over p of U[p, s] (facility location).

    A head foresees for heads of its own layer and of later ones.

    Args:
        foreseen: float [n, n], U[p, s]. layer: integers [n], the layer of each head.
        count: how many, at most: it ends early where nobody adds anything.

    Returns:
        Their numbers, best first; ties go to the earlier head.
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
    """Roles by greedy star clustering of similar heads, within each layer: HeteroCache Eq. 4 to 6, appendix C.2.

    The head with most neighbours that have no role yet becomes a pivot, these its satellites, and so on; ties go to the
    earlier head. Heads that are left, because nobody or only satellites resemble them, are anchors or volatile.

    Args:
        stability: float [layers, heads]. overlap: float [layers, heads, heads]; heads are neighbours from `tau_sim` on.

    Returns:
        int64 [layers, heads], places in ROLES.
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
    """HEAD_STATISTICS for a scorer: means over samples, zeros where samples are too short.

    Args:
        recordings, scorer, queries: as in `foresee`.
    """
    layers, heads = recordings[0][TOKENS].shape[:2]
    found = [kinship for kinship in map(compare_heads, recordings) if kinship is not None]
    nothing = Kinship(np.zeros((layers, heads)), np.zeros((layers, heads)), np.zeros((layers, heads, heads)))
    stability, similarity, overlap = (
        np.mean([getattr(kinship, name) for kinship in found or [nothing]], axis=0).astype(np.float32)
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


def _members(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Sets as bool [..., size], of tokens [..., k] with -1 for none."""
    return _spread(tokens, torch.ones(tokens.shape), size) > 0


def _spread(tokens: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [..., size] with the values [..., k] at their tokens, -1 for none, and 0 elsewhere."""
    room = torch.zeros((*tokens.shape[:-1], size + 1))
    places = torch.where(tokens < 0, size, tokens).long()
    return room.scatter_(-1, places, values.float())[..., :size]


def _median(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The median, of an even number the mean of the middle two."""
    return values.quantile(0.5, dim=dim)

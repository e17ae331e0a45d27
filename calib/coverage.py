"""Budgets by coverage: curves of later attention that a head's best tokens receive, and the profile made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from calib.output_error import error_curves, weighed
from calib.recordings_folder import Settings
from sgl_ragged.profiles.budgets import UNIT, coverage_kept
from sgl_ragged.profiles.profile import Profile
from sgl_ragged.profiles.reference import ReferenceText
from sgl_ragged.scorers import rank_positions


def coverage_curves(scores: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Sum the peak attention of each head's best 16, 32, .. tokens, in the order in which serving keeps them.

    Args:
        scores: float [segments, layers, heads, S]; segment 0 starts the sequence.
        peaks: float [layers, heads, segments * S], peak attention that each token receives.

    Returns:
        float32 [segments, layers, heads, S / 16], never falling along the last axis.
    """
    segments, _, _, length = scores.shape
    order = rank_positions(scores.flatten(1, 2), torch.arange(segments) == 0).view(scores.shape)
    received = peaks.float().unflatten(-1, (segments, length)).permute(2, 0, 1, 3)
    return received.gather(-1, order).unflatten(-1, (length // UNIT, UNIT)).sum(dim=-1).cumsum(dim=-1)


def derive_profile(
    recordings: Sequence[Mapping[str, torch.Tensor]],
    tasks: Sequence[str],
    settings: Settings,
    scorer: str,
    *,
    ratio: float,
    scope: str,
    queries: str,
    head_dim: int,
    statistics: Mapping[str, torch.Tensor],
    held_out: np.ndarray | None = None,
    errors: np.ndarray | None = None,
    reference: tuple[ReferenceText, ...] = (),
) -> Profile:
    """Make the profile of one scorer.

    Its curves are means over segments and samples. mu and sigma are taken over the samples, from the shares that each
    sample's own curves would give.

    Args:
        recordings: what `measure` returns, one per sample.
        tasks: one per sample.
        queries: "all" or "answers", whose attention the curves cover.
        statistics: tensors [layers, heads, ...] that go into the profile.
        held_out: quality of a trained scorer, as in `Profile`.
        errors: [layers, heads, counts] from `measure_errors`, by which curves are weighed (`output_error.weighed`).
        reference: predictions for held-out texts, as in `Profile`.
    """
    curves = [
        coverage_curves(r[f"{scorer}.scores"], r[f"peaks.{queries}"]).numpy().astype(np.float64) for r in recordings
    ]
    means = [np.concatenate(curves).mean(0), *(sample.mean(0) for sample in curves)]
    if errors is not None:
        means = [weighed(mean, error_curves(errors, settings.segment)) for mean in means]
    coverage, *sample_means = means
    sample_kept = [coverage_kept(mean, ratio, settings.segment, scope) for mean in sample_means]
    shares = np.stack(sample_kept) / settings.segment
    return Profile(
        mu=np.minimum(shares.mean(0), 1.0).astype(np.float32),
        sigma=shares.std(0).astype(np.float32),
        coverage=coverage.astype(np.float32),
        shares=shares.astype(np.float32),
        held_out=held_out,
        reference=reference,
        statistics=MappingProxyType({name: tensor.numpy() for name, tensor in statistics.items()}),
        tasks=tuple(tasks),
        model_id=settings.model.rstrip("/").split("/")[-1],
        model_fingerprint=settings.model_fingerprint,
        head_dim=head_dim,
        scorer=scorer,
        method="coverage",
        queries=queries,
        scope=scope,
        ratio=ratio,
        segment=settings.segment,
        samples=len(recordings),
        alpha=0.0,
        dataset_hash=settings.dataset_hash,
        provenance="python -m calib run",
    )

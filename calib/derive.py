"""From recordings to profiles: the methods `implied`, `coverage` and `roles`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from calib.coverage import coverage_curves
from calib.implied import implied_counts
from calib.output_error import error_curves, weighed
from calib.recordings_folder import Settings
from calib.roles import compare_heads
from sgl_ragged.profiles.budgets import coverage_kept, roles_kept
from sgl_ragged.profiles.head_statistics import ROLE, STABILITY
from sgl_ragged.profiles.profile import Profile


def derive_profile(
    recordings: Sequence[Mapping[str, torch.Tensor]],
    tasks: Sequence[str],
    settings: Settings,
    scorer: str,
    *,
    ratio: float,
    method: str,
    scope: str,
    queries: str,
    alpha: float,
    fit: str,
    head_dim: int,
    statistics: Mapping[str, torch.Tensor],
    held_out: np.ndarray | None = None,
    errors: np.ndarray | None = None,
) -> Profile:
    """The profile of one scorer.

    implied: mu and sigma are the mean and standard deviation over segments and samples of the share that each head
        gets from the non-uniform top-k at `ratio` (TANGRAM Eq. 3 and section 4.1).
    coverage: the curves are the mean over segments and samples of the peak attention that the head's best tokens
        cover; mu and sigma are taken over samples, of the shares that each sample's own curves would be given.
    roles: the heads' roles and stability are among the statistics (HeteroCache Eq. 7 and 8); mu and sigma are taken
        over samples, of the shares that each sample's own stability would give in the same roles.

    Args:
        recordings: what `measure` returns, one per sample.
        tasks: one per sample.
        queries: "all" or "answers", whose attention the curves cover; method coverage only.
        statistics: tensors [layers, heads, ...] that go into the profile.
        held_out: of a scorer that was trained, as in `Profile`.
        errors: of method coverage, what `measure_errors` found; curves are then `output_error.weighed` by them.

    Raises:
        RaggedConfigError: method roles, and the heads that keep everything take more than the ratio.
    """
    if method == "implied":
        counts = [implied_counts(r[f"{scorer}.scores"], ratio, scope).numpy() / settings.segment for r in recordings]
        every = np.concatenate(counts)
        mu, sigma, coverage = every.mean(0), every.std(0), None
        shares = np.stack([sample.mean(0) for sample in counts])
    elif method == "roles":
        role, mean = statistics[ROLE].numpy(), statistics[STABILITY].numpy()
        stability = [mean if kinship is None else kinship.stability for kinship in map(compare_heads, recordings)]
        shares = np.stack([roles_kept(role, one, ratio, settings.segment) for one in stability]) / settings.segment
        mu, sigma, coverage = shares.mean(0), shares.std(0), None
    else:
        curves = [
            coverage_curves(r[f"{scorer}.scores"], r[f"peaks.{queries}"]).numpy().astype(np.float64) for r in recordings
        ]
        means = [np.concatenate(curves).mean(0), *(c.mean(0) for c in curves)]
        if errors is not None:
            means = [weighed(mean, error_curves(errors, settings.segment)) for mean in means]
        coverage, *of_samples = means
        own = [coverage_kept(mean, ratio, settings.segment, scope) for mean in of_samples]
        shares = np.stack(own) / settings.segment
        mu, sigma = shares.mean(0), shares.std(0)
    return Profile(
        mu=np.minimum(mu, 1.0).astype(np.float32),
        sigma=sigma.astype(np.float32),
        coverage=None if coverage is None else coverage.astype(np.float32),
        shares=shares.astype(np.float32),
        held_out=held_out,
        statistics=MappingProxyType({name: tensor.numpy() for name, tensor in statistics.items()}),
        tasks=tuple(tasks),
        model_id=settings.model.rstrip("/").split("/")[-1],
        model_fingerprint=settings.model_fingerprint,
        head_dim=head_dim,
        scorer=scorer,
        method=method,
        queries=queries if method == "coverage" else "",
        scope=scope,
        ratio=ratio,
        segment=settings.segment,
        samples=len(recordings),
        alpha=alpha,
        fit=fit,
        dataset_hash=settings.dataset_hash,
        provenance="python -m calib run",
    )

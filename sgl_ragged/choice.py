"""Which budgets a model is served with: those of a profile, of a bundled one, or equal ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_ragged.budgets import profile_kept, uniform_kept
from sgl_ragged.bundled import find_bundled
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.profile import Profile, load_profile


@dataclass(frozen=True)
class BudgetChoice:
    """Kept tokens per segment of the whole model, int64 [layers, heads], and where they come from.

    `profile` is None for equal budgets; `source` is one line for the log.
    """

    kept: np.ndarray
    profile: Profile | None
    source: str


def choose_budgets(geometry: ModelGeometry, *, profile: str, scorer: str, ratio: float, segment: int) -> BudgetChoice:
    """What --ragged-profile means for a model.

    Args:
        profile: a path, "uniform", or "auto" for the bundled profile of this model and scorer, if there is one.

    Raises:
        RaggedConfigError: the file is damaged, made for another model or scorer, or does not serve this ratio.
    """
    path = find_bundled(geometry.fingerprint, scorer) if profile == "auto" else Path(profile)
    if profile == "uniform" or path is None:
        why = "--ragged-profile uniform"
        if profile != "uniform":
            why = "no bundled profile for this model and scorer, a server calibrates it at its first start; until then"
        return BudgetChoice(
            kept=uniform_kept(geometry.num_layers, geometry.num_heads, ratio, segment),
            profile=None,
            source=f"{why}: every head gets the same budget (ratio {ratio}). Heads differ in what they need; a "
            f"calibrated profile moves the same bytes to the heads that use them (python -m calib run)",
        )
    loaded = load_profile(path)
    loaded.require_model(geometry)
    if loaded.scorer != scorer:
        raise RaggedConfigError(
            f"the profile was calibrated with scorer {loaded.scorer!r}, --ragged-scorer is {scorer!r}: use the same"
        )
    kind = "bundled profile" if profile == "auto" else "profile"
    measured = f"{loaded.method}, calibrated at ratio {loaded.ratio} and segment {loaded.segment}"
    return BudgetChoice(
        kept=profile_kept(loaded, ratio, segment),
        profile=loaded,
        source=f"budgets from {kind} {path} ({loaded.model_id}, {measured}, digest {loaded.digest()})",
    )

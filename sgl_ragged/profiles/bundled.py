"""Profiles that come with the package, found by the model's fingerprint (docs/calibration.md)."""

from __future__ import annotations

from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.profile_choice import BUNDLED, UNIFORM, ProfileFile, ReadableProfile, Uniform

FOLDER = Path(__file__).parent / "bundled_profiles"


def find_bundled(fingerprint: str, scorer: str) -> Path | None:
    """The bundled profile for models with this fingerprint and this scorer, None if there is none."""
    return _bundled(fingerprint).get(scorer)


def named_profile(value: str, geometry: ModelGeometry, scorer: str) -> ReadableProfile:
    """The choice that a value of --ragged-profile other than AUTO names.

    Raises:
        RaggedConfigError: as `bundled_profile` does.
    """
    if value == UNIFORM:
        return Uniform()
    return bundled_profile(geometry, scorer) if value == BUNDLED else ProfileFile(Path(value).absolute())


def bundled_profile(geometry: ModelGeometry, scorer: str) -> ProfileFile:
    """The choice of --ragged-profile bundled.

    Raises:
        RaggedConfigError: no bundled profile fits the model and the scorer.
    """
    fitting = _bundled(geometry.fingerprint)
    if scorer in fitting:
        return ProfileFile(fitting[scorer], "bundled profile")
    why = f"for this model there are those of {', '.join(fitting)}" if fitting else "none has its geometry"
    raise RaggedConfigError(
        f"no bundled profile fits {geometry.name} with scorer {scorer!r}: {why}; use --ragged-profile auto, which "
        f"calibrates a model once, or give a FILE"
    )


def _bundled(fingerprint: str) -> dict[str, Path]:
    """Paths of the profiles with this fingerprint, by scorer."""
    loaded = {path: load_profile(path) for path in sorted(FOLDER.glob("*.safetensors"))}
    return {one.scorer: path for path, one in loaded.items() if one.model_fingerprint == fingerprint}

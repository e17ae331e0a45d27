"""Choice of the profile from which a start takes the budgets of heads.

A choice is a type, not a string, so that the word "uniform" is never read as the name of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import load_profile

AUTO, UNIFORM, BUNDLED = "auto", "uniform", "bundled"
"""Values of --ragged-profile that are words; every other value is the path of a file."""

BUNDLED_FOLDER = Path(__file__).parent / "bundled_profiles"
"""Profiles that come with the package, each for one model's fingerprint and one scorer (docs/calibration.md)."""


@dataclass(frozen=True)
class Uniform:
    """Every head keeps the same share of its tokens; no file is read.

    Args:
        why: clause for the log with the reason.
    """

    why: str = f"--ragged-profile {UNIFORM}"

    def __str__(self) -> str:
        """Return the name for operators, in logs and `/server_info`."""
        return UNIFORM


@dataclass(frozen=True)
class ProfileFile:
    """Budgets come from an existing file.

    Args:
        path: absolute.
        kind: name of the file's kind in the log.
    """

    path: Path
    kind: str = "profile"

    def __str__(self) -> str:
        """Return the name for operators, in logs and `/server_info`."""
        return str(self.path)


@dataclass(frozen=True)
class CachedProfile:
    """Budgets come from the profile cache: the file exists, or the launcher calibrates the model first.

    Args:
        path: absolute.
    """

    path: Path

    @property
    def file(self) -> ProfileFile:
        """The choice once the file exists."""
        return ProfileFile(self.path)

    def __str__(self) -> str:
        """Return the name for operators, in logs and `/server_info`."""
        return str(self.path)


ReadableProfile = Uniform | ProfileFile
"""Choices from which budgets can be made without calibration."""

ProfileChoice = ReadableProfile | CachedProfile


def named_profile(value: str, geometry: ModelGeometry, scorer: str) -> ReadableProfile:
    """Resolve a value of --ragged-profile other than AUTO.

    Raises:
        RaggedConfigError: the value is BUNDLED, and no bundled profile fits the model and the scorer.
    """
    if value == UNIFORM:
        return Uniform()
    return bundled_profile(geometry, scorer) if value == BUNDLED else ProfileFile(Path(value).absolute())


def bundled_profile(geometry: ModelGeometry, scorer: str) -> ProfileFile:
    """Find the bundled profile for a model and a scorer.

    Raises:
        RaggedConfigError: no bundled profile fits the model and the scorer.
    """
    paths = bundled_paths(geometry.fingerprint)
    if scorer in paths:
        return ProfileFile(paths[scorer], "bundled profile")
    why = f"for this model there are profiles of {', '.join(paths)}" if paths else "none has its geometry"
    raise RaggedConfigError(
        f"no bundled profile fits {geometry.name} with scorer {scorer!r}: {why}; use --ragged-profile auto, which "
        f"calibrates a model once, or give a FILE"
    )


def bundled_paths(fingerprint: str) -> dict[str, Path]:
    """List the bundled profiles for models with this fingerprint, by scorer."""
    profiles = {path: load_profile(path) for path in sorted(BUNDLED_FOLDER.glob("*.safetensors"))}
    return {profile.scorer: path for path, profile in profiles.items() if profile.model_fingerprint == fingerprint}

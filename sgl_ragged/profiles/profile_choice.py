"""Where the head budgets of a start come from.

A choice is a type, not a string: the word "uniform" must never be read as the name of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AUTO, UNIFORM, BUNDLED = "auto", "uniform", "bundled"
"""Values of --ragged-profile that are words; every other value is the path of a file."""


@dataclass(frozen=True)
class Uniform:
    """Every head keeps the same share of its tokens; no file is read.

    why: clause for the log that says why heads are not told apart.
    """

    why: str = f"--ragged-profile {UNIFORM}"

    def __str__(self) -> str:
        """Name for operators, in logs and `/server_info`."""
        return UNIFORM


@dataclass(frozen=True)
class ProfileFile:
    """Budgets from an existing file.

    path: absolute. kind: how the log calls the profile.
    """

    path: Path
    kind: str = "profile"

    def __str__(self) -> str:
        """Name for operators, in logs and `/server_info`."""
        return str(self.path)


@dataclass(frozen=True)
class CachedProfile:
    """Budgets from the profile cache: the file exists, or calibration makes it (`launch.calibrating`).

    path: absolute.
    """

    path: Path

    @property
    def file(self) -> ProfileFile:
        """The choice once the file exists."""
        return ProfileFile(self.path)

    def __str__(self) -> str:
        """Name for operators, in logs and `/server_info`."""
        return str(self.path)


ReadableProfile = Uniform | ProfileFile
"""Choices from which budgets can be made at once."""

ProfileChoice = ReadableProfile | CachedProfile

"""Profiles that come with the package, found by the model's fingerprint (docs/calibration.md)."""

from __future__ import annotations

from pathlib import Path

from sgl_ragged.profiles.profile import load_profile

FOLDER = Path(__file__).parent / "bundled_profiles"


def find_bundled(fingerprint: str, scorer: str) -> Path | None:
    """The bundled profile for models with this fingerprint and this scorer, None if there is none."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        profile = load_profile(path)
        if (profile.model_fingerprint, profile.scorer) == (fingerprint, scorer):
            return path
    return None

"""A profile's reference in place of a server that keeps everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.quality import MeasuredQuality, kl_at
from sgl_ragged.profiles.reference import ReferenceText
from sgl_ragged.verify.distributions import Distributions
from sgl_ragged.verify.prompts import TokenizedPrompt

NO_REFERENCE = "has no reference for sgl-ragged verify: calibrate again to record one"


class ProfileReference:
    """Recorded predictions of the uncompressed model, read from a profile.

    Args:
        segment: tokens per segment of the profile.
        name: for tables and messages.
        quality: what was measured of servers with the profile.
    """

    def __init__(
        self, texts: Sequence[ReferenceText], segment: int, name: str, quality: Sequence[MeasuredQuality] = ()
    ) -> None:
        self.url, self.segment, self._texts, self._quality = name, segment, texts, quality

    @classmethod
    def from_file(cls, path: Path) -> ProfileReference:
        """Read a profile. Raises RaggedConfigError if it cannot be read, or has no reference."""
        profile = load_profile(path)
        if not profile.reference:
            raise RaggedConfigError(f"profile {path} {NO_REFERENCE}")
        return cls(profile.reference, profile.segment, f"profile {path}", profile.quality)

    @property
    def likeliest(self) -> int:
        """Tokens per position whose log-probabilities were recorded."""
        return self._texts[0].likeliest.shape[1]

    @property
    def prompts(self) -> list[TokenizedPrompt]:
        """The texts for which predictions were recorded."""
        return [TokenizedPrompt(text.name, text.tokens.tolist()) for text in self._texts]

    def measured_kl(self, ratio: float) -> float | None:
        """Return the KL that was measured at a ratio, or interpolated; None outside of what was measured."""
        return kl_at(self._quality, ratio)

    def info(self) -> dict[str, Any]:
        return {}

    def read(self, ids: Sequence[int], start: int = 0) -> Distributions:
        """Return what was recorded after position `start` of one of `prompts`."""
        text = next(text for text in self._texts if text.tokens.tolist() == list(ids))
        return Distributions.from_reference(text).since(start + 1)

"""What is compared: a scorer, budgets and a ratio."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT = "default"
"""The server's own choice of a scorer."""


@dataclass(frozen=True)
class Configuration:
    """A server on the ragged pool; `ratio` None for SGLang's token pool. `budgets`: auto, uniform or a file."""

    scorer: str
    budgets: str
    ratio: float | None

    @classmethod
    def token(cls) -> Configuration:
        return cls("", "", None)

    def flags(self, segment: int) -> list[str]:
        """Flags of the server, without that of the ratio."""
        if self.ratio is None:
            return []
        scorer = [] if self.scorer == DEFAULT else ["--ragged-scorer", self.scorer]
        profile = self.budgets.replace("{scorer}", self.scorer)
        return [*scorer, "--ragged-profile", profile, "--ragged-segment", str(segment)]

    def __str__(self) -> str:
        return "token pool" if self.ratio is None else f"{self.scorer}, {self.budgets}, ratio {self.ratio:g}"


def configurations(scorers: Sequence[str], budgets: Sequence[str], ratios: Sequence[float]) -> list[Configuration]:
    return [Configuration(*one) for one in itertools.product(scorers, budgets, ratios)]

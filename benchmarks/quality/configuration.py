"""What is compared: a scorer, budgets, a ratio and the dtype of the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT = "default"
"""The server's own choice of a scorer."""

WIDE = "auto"
"""SGLang's name for a cache of the model's dtype."""


@dataclass(frozen=True)
class Configuration:
    """A server on the ragged pool; `ratio` None for SGLang's token pool. `budgets`: auto, uniform or a file.

    `cache`: --kv-cache-dtype. An FP8 cache has the bytes of a 16-bit one at half its ratio.
    """

    scorer: str
    budgets: str
    ratio: float | None
    cache: str = WIDE

    @classmethod
    def token(cls) -> Configuration:
        return cls("", "", None)

    def flags(self, segment: int) -> list[str]:
        """Flags of the server, without that of the ratio."""
        if self.ratio is None:
            return []
        scorer = [] if self.scorer == DEFAULT else ["--ragged-scorer", self.scorer]
        profile = self.budgets.replace("{scorer}", self.scorer)
        cache = [] if self.cache == WIDE else ["--kv-cache-dtype", self.cache]
        return [*scorer, "--ragged-profile", profile, "--ragged-segment", str(segment), *cache]

    @property
    def name(self) -> str:
        """What it is, without the ratio."""
        return ", ".join([self.scorer, self.budgets, *([] if self.cache == WIDE else [self.cache])])

    def __str__(self) -> str:
        return "token pool" if self.ratio is None else f"{self.name}, ratio {self.ratio:g}"


def configurations(
    scorers: Sequence[str], budgets: Sequence[str], ratios: Sequence[float], caches: Sequence[str] = (WIDE,)
) -> list[Configuration]:
    return [Configuration(*one) for one in itertools.product(scorers, budgets, ratios, caches)]

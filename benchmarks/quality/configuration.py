"""What is compared: a scorer, budgets, a ratio, the dtype of the cache and the format of slabs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ragged.mem_pool import slab_format

DEFAULT = "default"
"""The server's own choice of a scorer."""

WIDE = "auto"
"""SGLang's name for a cache of the model's dtype."""

UNFITTED = "none"
"""What results are of that do not say: the flag is younger than they are."""


@dataclass(frozen=True)
class Configuration:
    """A server on the ragged pool; `ratio` None for SGLang's token pool. `budgets`: auto, uniform or a file.

    `cache`: --kv-cache-dtype. An FP8 cache has the bytes of a 16-bit one at half its ratio. `slabs`:
    --ragged-slab-dtype; where they are quantised, the ratio is one of a 16-bit cache's bytes. `fit`: --ragged-fit.
    """

    scorer: str
    budgets: str
    ratio: float | None
    cache: str = WIDE
    slabs: str = slab_format.WIDE.name
    fit: str = UNFITTED

    @classmethod
    def token(cls) -> Configuration:
        return cls("", "", None)

    @property
    def served_ratio(self) -> float | None:
        """--ragged-ratio: servers of this benchmark compute in float32, and codes are no wider beside that."""
        if self.ratio is None or self.slabs == slab_format.WIDE.name:
            return self.ratio
        return self.ratio * 2 / 4

    def flags(self, segment: int) -> list[str]:
        """Flags of the server, without that of the ratio."""
        if self.ratio is None:
            return []
        scorer = [] if self.scorer == DEFAULT else ["--ragged-scorer", self.scorer]
        profile = self.budgets.replace("{scorer}", self.scorer)
        cache = [] if self.cache == WIDE else ["--kv-cache-dtype", self.cache]
        slabs = [] if self.slabs == slab_format.WIDE.name else ["--ragged-slab-dtype", self.slabs]
        fit = ["--ragged-fit", self.fit]
        return [*scorer, "--ragged-profile", profile, "--ragged-segment", str(segment), *cache, *slabs, *fit]

    @property
    def name(self) -> str:
        """What it is, without the ratio."""
        narrow = [self.cache] * (self.cache != WIDE) + [self.slabs] * (self.slabs != slab_format.WIDE.name)
        return ", ".join([self.scorer, self.budgets, *narrow, *(["fitted"] * (self.fit != UNFITTED))])

    def __str__(self) -> str:
        return "token pool" if self.ratio is None else f"{self.name}, ratio {self.ratio:g}"


def configurations(
    scorers: Sequence[str],
    budgets: Sequence[str],
    ratios: Sequence[float],
    caches: Sequence[str] = (WIDE,),
    slabs: Sequence[str] = (slab_format.WIDE.name,),
    fits: Sequence[str] = (UNFITTED,),
) -> list[Configuration]:
    return [Configuration(*one) for one in itertools.product(scorers, budgets, ratios, caches, slabs, fits)]

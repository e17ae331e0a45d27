"""Division of a request's segments between loading from the host tier and computing. Plain arithmetic.

A sealed segment is a function of the tokens before it, so loading its slab and computing it again give the same. Krul
("bubble-free restoration") computes the first segments of a conversation while the last ones are loaded, so that both
end together.
"""

from __future__ import annotations

AUTO, LOAD, RECOMPUTE = "auto", "load", "recompute"
MODES = (AUTO, LOAD, RECOMPUTE)
"""Values of --ragged-restore: the faster way, always load, and always Krul's schedule."""

MIN_SAVED_SHARE = 0.2
"""Least share of the loading time that `auto` must save, because computing takes time from other requests."""

MIN_SAVED_S = 0.005
"""Least seconds that `auto` must save, about the cost of an additional forward pass."""

PROBE_EVERY = 16
"""Every n-th hit on a storage that is slower than computing is read anyway, to measure it again."""

_NEW_SHARE = 0.3
"""Weight of the newest measurement in a mean."""


class Rate:
    """Running mean of the seconds that a segment takes; None before the first measurement."""

    def __init__(self) -> None:
        self.segment_s: float | None = None

    def add(self, segments: float, seconds: float) -> None:
        """Add a measurement; one of 0 segments is ignored."""
        if segments <= 0:
            return
        found = seconds / segments
        self.segment_s = found if self.segment_s is None else (1 - _NEW_SHARE) * self.segment_s + _NEW_SHARE * found


def recomputed_first(segments: int, mode: str, compute: Rate, load: Rate) -> int:
    """Return the number of first segments, out of `segments`, to compute while the rest is loaded.

    k segments take k * c seconds to compute, the other n - k take (n - k) * l to load: both end together at
    k = n * l / (l + c).
    """
    if mode == LOAD or segments < 2:
        return 0
    if compute.segment_s is None or load.segment_s is None:
        return segments // 2 if mode == RECOMPUTE else 0
    both = compute.segment_s + load.segment_s
    count = int(segments * load.segment_s / both) if both else 0
    if mode == RECOMPUTE:
        return max(count, 1)
    alone = segments * load.segment_s
    saved = alone - max(count * compute.segment_s, (segments - count) * load.segment_s)
    return count if saved >= max(MIN_SAVED_SHARE * alone, MIN_SAVED_S) else 0


class StoragePays:
    """Choice between reading hits of a storage and computing them: where reading is slower, computing all is faster.

    SGLang reads from the first page on before a request starts. So unlike with the host, the start of a history cannot
    be computed while the end is read.
    """

    def __init__(self, mode: str, compute: Rate) -> None:
        self._mode = mode
        self._compute = compute
        self._skipped = 0
        self.read = Rate()

    def __call__(self) -> bool:
        """Return True if this hit is to be read; call it once per hit."""
        if self._mode != AUTO or self.read.segment_s is None or self._compute.segment_s is None:
            return True
        if self.read.segment_s <= self._compute.segment_s:
            return True
        self._skipped += 1
        return self._skipped % PROBE_EVERY == 0

"""Limits on the distances of a comparison."""

from __future__ import annotations

from sgl_ragged.verify.comparison import Comparison

MAX_KL = 0.05
"""Default limit on the mean KL to the reference, nats."""

MAX_OWN_KL = 1e-3
"""Default limit on the mean KL of cache hits to misses, and of decode to prefill, nats."""


def limits_exceeded(found: Comparison, max_kl: float = MAX_KL, max_own_kl: float = MAX_OWN_KL) -> list[str]:
    """Return a line for each mean that exceeds its limit; NaN does."""
    limits = (
        ("to_reference", "KL to the reference", max_kl),
        ("hit_to_miss", "KL of cache hits to misses", max_own_kl),
        ("decode_to_prefill", "KL of decode to prefill", max_own_kl),
    )
    return [
        f"{name} is {mean.kl:.2g}, and {limit:g} is allowed"
        for kind, name, limit in limits
        if (mean := found.mean(kind)) is not None and not mean.kl <= limit
    ]

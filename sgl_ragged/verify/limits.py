"""Limits on the distances of a comparison."""

from __future__ import annotations

from sgl_ragged.verify.comparison import Comparison

MAX_KL = 0.05
"""Limit on the mean KL to the reference where none was measured, nats."""

MEASURED_FACTOR, MEASURED_MARGIN = 1.25, 1e-4
"""Factor on the KL that was measured for a profile, and nats on top, up to which a server counts as the same."""

MAX_OWN_KL = 1e-3
"""Default limit on the mean KL of cache hits to misses, and of decode to prefill, nats."""


def allowed_kl(measured: float | None) -> float:
    """Return the limit on the mean KL to the reference, nats.

    Args:
        measured: KL that `python -m calib quality` measured at the server's ratio; None if it did not.
    """
    return MAX_KL if measured is None else MEASURED_FACTOR * measured + MEASURED_MARGIN


def limits_exceeded(found: Comparison, max_kl: float = MAX_KL, max_own_kl: float = MAX_OWN_KL) -> list[str]:
    """Return a line for each mean that exceeds its limit; NaN does."""
    limits = (
        ("to_reference", "KL to the reference", max_kl),
        ("hit_to_miss", "KL of cache hits to misses", max_own_kl),
        ("decode_to_prefill", "KL of decode to prefill", max_own_kl),
    )
    return [
        f"{name} is {mean.kl:.2g}, and {limit:.2g} is allowed"
        for kind, name, limit in limits
        if (mean := found.mean(kind)) is not None and not mean.kl <= limit
    ]

"""Tables and lines of the results, for the terminal and for documents."""

from __future__ import annotations

from benchmarks.harness.rows import Rows
from benchmarks.returning.results import Results, Spread
from benchmarks.returning.visit import DEVICE, HOST, RECOMPUTED, TIERS, TIGHT


def by_tier(results: Results) -> Rows:
    """Median TTFT of each variant and tier, its range, and ratios to recomputing and to the first variant."""
    variants = results.variants()
    base = variants[0]
    columns = ("pool", "tier", "returns", "TTFT ms", "least", "greatest", "/ recomputed", f"/ {base}")
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        # Variants that differ in how they restore recompute alike.
        own_cell = results.of(variant, RECOMPUTED)
        recomputed = results.ttft_s(variant if own_cell else variant.partition("/")[0], RECOMPUTED)
        for tier in TIERS:
            own = results.ttft_s(variant, tier)
            if own.count:
                values = (_ms(own.median), _ms(own.low), _ms(own.high))
                ratios = (ratio(own, recomputed), ratio(own, results.ttft_s(base, tier)))
                rows.append((variant, tier, str(own.count), *values, *ratios))
    return Rows("TTFT of a return, by the tier that the conversation is on", columns, tuple(rows))


def tight(results: Results) -> Rows:
    """Hit rate and TTFT where the host is too small for some of the pools."""
    variants = [one for one in results.variants() if results.of(one, TIGHT)]
    columns = ("pool", "host tokens", "returns", "hit rate", "TTFT ms", "least", "greatest", f"/ {variants[0]}")
    tokens = {one.variant: one.host_tokens for one in results.servers if one.stage == "tight host"}
    rows = []
    for variant in variants:
        own = results.ttft_s(variant, TIGHT)
        values = (_ms(own.median), _ms(own.low), _ms(own.high), ratio(own, results.ttft_s(variants[0], TIGHT)))
        rows.append(
            (variant, f"{tokens[variant]:,}", str(own.count), f"{results.hit_rate(variant, TIGHT):.0%}", *values)
        )
    return Rows("A smaller host, every conversation once more", columns, tuple(rows))


def restored_above_device(results: Results) -> Rows:
    """What the host adds to a return from the device: TTFT from the host less that right after it, of the same turn."""
    rows = []
    for variant in results.variants():
        pairs = zip(results.of(variant, HOST), results.of(variant, DEVICE), strict=False)
        added = Spread.of([host.ttft_s - device.ttft_s for host, device in pairs])
        rows.append((variant, str(added.count), _ms(added.median), _ms(added.low), _ms(added.high)))
    columns = ("pool", "returns", "host - device, ms", "least", "greatest")
    return Rows("What the way back from the host adds", columns, tuple(rows))


def strays(results: Results) -> list[str]:
    """Which visits do not count, a line each."""
    return [
        f"{one.variant}, {one.cell}, conversation {one.conversation + 1}: of {one.held} tokens {one.device} were found "
        f"on the device, {one.host} on the host, {one.storage} on the disk"
        for one in results.strays()
    ]


def ratio(own: Spread, other: Spread) -> str:
    """Of the medians; empty where there is none."""
    return f"{own.median / other.median:.2f}" if own.median is not None and other.median else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f}"

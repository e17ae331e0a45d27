"""Tables and lines of the results, for the terminal and for documents."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.harness.table import Table
from benchmarks.multi_turn.returning.results import Returns
from benchmarks.multi_turn.returning.visit import DEVICE, HOST, RECOMPUTED, TIERS
from benchmarks.multi_turn.summary import MedianRange


def all_of(results: Returns) -> list[Table]:
    """All tables for which there are results."""
    return [by_tier(results), restored_above_device(results)]


def by_tier(results: Returns) -> Table:
    """Median TTFT of each variant and tier, its range, and ratios to recomputing and to the first variant."""
    variants = results.variants()
    base = variants[0]
    columns = ("pool", "tier", "returns", "TTFT ms", "least", "greatest", "/ recomputed", f"/ {base}")
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        # Variants that differ in how they restore recompute alike.
        own_cell = results.counted(variant, RECOMPUTED)
        recomputed = results.ttft_s(variant if own_cell else variant.partition("/")[0], RECOMPUTED)
        for tier in TIERS:
            if own := results.ttft_s(variant, tier):
                ratios = (_ratio(own, recomputed), _ratio(own, results.ttft_s(base, tier)))
                rows.append((variant, tier, str(len(own)), *_ms(own), *ratios))
    return Table("TTFT of a return, by the tier that the conversation is on", columns, rows)


def restored_above_device(results: Returns) -> Table:
    """What the host adds to a return from the device: TTFT from the host less that right after it, of the same turn."""
    rows = []
    for variant in results.variants():
        pairs = zip(results.counted(variant, HOST), results.counted(variant, DEVICE), strict=False)
        added = [host.ttft_s - device.ttft_s for host, device in pairs]
        rows.append((variant, str(len(added)), *_ms(added)))
    columns = ("pool", "returns", "host - device, ms", "least", "greatest")
    return Table("What the way back from the host adds", columns, rows)


def strays(results: Returns) -> list[str]:
    """Which visits do not count, a line each."""
    return [
        f"{one.variant}, {one.cell}, conversation {one.conversation + 1}: of {one.held} tokens {one.device} were found "
        f"on the device, {one.host} on the host, {one.storage} on the disk"
        for one in results.strays()
    ]


def _ratio(own: Sequence[float], other: Sequence[float]) -> str:
    """Of the medians; empty where there is none."""
    return f"{statistics.median(own) / statistics.median(other):.2f}" if own and other else ""


def _ms(seconds: Sequence[float]) -> tuple[str, ...]:
    """Median, least and greatest in milliseconds; empty where there is none."""
    found = MedianRange.of(seconds)
    return tuple(f"{1000 * one:,.0f}" if seconds else "" for one in (found.median, found.low, found.high))

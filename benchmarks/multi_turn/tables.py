"""The tables of a benchmark, as rows of text: for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.table import Table
from benchmarks.multi_turn.measures import PARTS
from benchmarks.multi_turn.point import Point
from benchmarks.multi_turn.summary import Cell, MedianRange, cells


def totals(points: Sequence[Point]) -> Table:
    """One row for each number of clients and pool; medians over the runs that count."""
    columns = (
        *("pool", "clients", "runs", "virtual tokens", "TTFT ms p50", "TTFT p95", "TTFT p99", "ITL ms p50", "ITL p95"),
        *("latency ms p50", "latency p95", "output tokens/s", "cached", "hit rate", "retractions", "peak KV MiB"),
        "recall",
    )
    rows = []
    for cell in cells(points):
        count = f"{len(cell.points)}/{len(cell.points) + len(cell.rejected)}"
        if not cell.points:
            rows.append((cell.pool, str(cell.clients), count, *["rejected"] * (len(columns) - 3)))
            continue
        values = (
            _number(cell.total(lambda f: f.ttft_ms.p50)),
            _number(cell.total(lambda f: f.ttft_ms.p95)),
            _number(cell.total(lambda f: f.ttft_ms.p99)),
            _number(cell.total(lambda f: f.itl_ms.p50), 1),
            _number(cell.total(lambda f: f.itl_ms.p95), 1),
            _number(cell.total(lambda f: f.latency_ms.p50)),
            _number(cell.total(lambda f: f.latency_ms.p95)),
            _number(cell.total(lambda f: f.output_tokens_per_s), 1),
            _share(cell.total(lambda f: f.cached_share)),
            _share(cell.total(lambda f: f.hit_rate)),
            _number(cell.total(lambda f: f.retractions)),
            f"{cell.peak_bytes / 2**20:.0f}",
            _number(cell.total(lambda f: f.recall), 2),
        )
        rows.append((cell.pool, str(cell.clients), count, f"{cell.virtual_tokens:,}", *values))
    return Table("medians over the runs", columns, rows)


def by_round(points: Sequence[Point], clients: int) -> Table:
    """One row for each round, all pools next to each other; medians over the runs that count."""
    counted = [cell for cell in cells(points) if cell.clients == clients and cell.points]
    columns = ["round"]
    for cell in counted:
        columns += [f"{cell.pool}: TTFT ms p50", "TTFT p95", "output tokens/s", "cached", "retractions"]
    numbers = sorted({number for cell in counted for number in cell.by_round(lambda f: f.requests)})
    rows = [(str(number + 1), *(text for cell in counted for text in _round(cell, number))) for number in numbers]
    return Table(f"{clients} clients, by round", columns, rows)


def by_part(points: Sequence[Point]) -> Table:
    """How the time between tokens changes along the answers: one row for each number of clients and pool."""
    columns = ("pool", "clients", *(f"{part + 1}/{PARTS}" for part in range(PARTS)), "last / second")
    rows = []
    for cell in cells(points):
        if cell.points:
            parts = cell.itl_by_part()
            ratio = parts[-1].median / parts[1].median
            shown = "" if ratio != ratio else f"{ratio:.2f}"
            rows.append((cell.pool, str(cell.clients), *(_number(part, 1) for part in parts), shown))
    return Table("ITL ms p50 by eighth of the answers", columns, rows)


def _round(cell: Cell, number: int) -> tuple[str, ...]:
    nothing = MedianRange.of([])
    return (
        _number(cell.by_round(lambda f: f.ttft_ms.p50).get(number, nothing)),
        _number(cell.by_round(lambda f: f.ttft_ms.p95).get(number, nothing)),
        _number(cell.by_round(lambda f: f.output_tokens_per_s).get(number, nothing)),
        _share(cell.by_round(lambda f: f.cached_share).get(number, nothing)),
        _number(cell.by_round(lambda f: f.retractions).get(number, nothing)),
    )


def rejections(points: Sequence[Point]) -> list[str]:
    """Which points were rejected and why, a line each."""
    return [f"{point.key}: {point.rejected}" for point in points if point.rejected is not None]


def _number(middle: MedianRange, digits: int = 0) -> str:
    return "" if middle.median != middle.median else f"{middle.median:,.{digits}f}"


def _share(middle: MedianRange) -> str:
    return "" if middle.median != middle.median else f"{middle.median:.0%}"

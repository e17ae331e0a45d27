"""Command `inspect`: contents of a profile, its budgets, and how stable they are."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from calib.grouping import ORDERS, Reclaimed, measure_reclaimed
from calib.role_report import RoleReport, measure_roles
from calib.stability import STEADY, Stability, measure_stability
from sgl_ragged.profiles.budgets import check_budgets
from sgl_ragged.profiles.head_statistics import ROLES
from sgl_ragged.profiles.profile import HELD_OUT, Profile, load_profile, profile_kept

_FIELDS = (
    *("model_id", "model_fingerprint", "head_dim", "scorer", "method", "scope", "ratio", "segment", "samples"),
    *("queries", "alpha", "dataset_hash", "provenance", "license"),
)
"""Fields of the profile that the report shows."""


@dataclass(frozen=True)
class Budgets:
    """Budgets as served at `ratio`, in tokens per segment of `segment` tokens.

    Args:
        memory_kept: kept / full KV bytes.
        span: largest / smallest mean share (mu) of a head; None if the smallest is 0.
        layers: smallest, mean and largest kept share of the heads in each layer.
    """

    ratio: float
    segment: int
    min: int
    median: float
    max: int
    memory_kept: float
    span: float | None
    layers: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Report:
    """Everything that `inspect` prints.

    Args:
        kept: int64 [layers, heads], tokens per segment as served.
        held_out: means over layers of `Profile.held_out`, by column.
    """

    profile: dict[str, Any]
    budgets: Budgets
    stability: Stability | None
    reclaimed: tuple[Reclaimed, ...]
    kept: np.ndarray
    held_out: dict[str, float] | None = None
    roles: RoleReport | None = None

    def as_json(self) -> str:
        """Format the report as one JSON object."""
        return json.dumps(asdict(self) | {"kept": self.kept.tolist()}, allow_nan=False)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `python -m calib`."""
    parser = commands.add_parser("inspect", help="show a profile's budgets and their stability", description=__doc__)
    parser.add_argument("profile", type=Path, metavar="PROFILE.safetensors")
    parser.add_argument("--ratio", type=float, help="kept / full KV bytes (default: the profile's)")
    parser.add_argument("--segment", type=int, help="tokens per segment (default: the profile's)")
    parser.add_argument("--roles", action="store_true", help="print the roles of heads, which JSON always has")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots to this folder")
    parser.add_argument(
        "--format", choices=("png", "svg"), default="png", help="file format of the plots (default: png)"
    )
    parser.set_defaults(run=show_profile)


def show_profile(options: argparse.Namespace) -> None:
    """Print the report on a profile, and write plots if a folder for them is given."""
    profile = load_profile(options.profile)
    report = make_report(profile, options.ratio, options.segment)
    if options.json:
        print(report.as_json())
    else:
        print_report(report)
        if options.roles:
            print_roles(report.roles)
    if options.plots is not None:
        from calib.plots import write_plots  # matplotlib takes seconds to import

        paths = write_plots(
            profile, report.kept, report.budgets.segment, report.reclaimed, report.roles, options.plots, options.format
        )
        if not options.json:
            print(f"plots: {', '.join(str(path) for path in paths)}")


def make_report(profile: Profile, ratio: float | None = None, segment: int | None = None) -> Report:
    """Measure a profile at a ratio and a segment length, by default the profile's own.

    Raises:
        RaggedConfigError: the ratio or the segment length is out of range.
    """
    ratio = profile.ratio if ratio is None else ratio
    segment = profile.segment if segment is None else segment
    check_budgets(ratio, segment)
    kept = profile_kept(profile, ratio, segment)
    return Report(
        profile=_profile_fields(profile),
        budgets=_measure_budgets(profile, kept, ratio, segment),
        stability=measure_stability(profile),
        reclaimed=measure_reclaimed(profile, kept, segment),
        kept=kept,
        held_out=_held_out_means(profile),
        roles=measure_roles(profile),
    )


def _held_out_means(profile: Profile) -> dict[str, float] | None:
    if profile.held_out is None:
        return None
    return dict(zip(HELD_OUT, profile.held_out.astype(np.float64).mean(axis=0).tolist(), strict=True))


def _profile_fields(profile: Profile) -> dict[str, Any]:
    return {
        "digest": profile.digest(),
        "layers": profile.num_layers,
        "heads": profile.num_heads,
        **{name: getattr(profile, name) for name in _FIELDS},
        "tasks": dict(Counter(profile.tasks)),
        "statistics": sorted(profile.statistics),
    }


def _measure_budgets(profile: Profile, kept: np.ndarray, ratio: float, segment: int) -> Budgets:
    shares = kept / segment
    smallest = float(profile.mu.min())
    return Budgets(
        ratio=ratio,
        segment=segment,
        min=int(kept.min()),
        median=float(np.median(kept)),
        max=int(kept.max()),
        memory_kept=float(shares.mean()),
        span=float(profile.mu.max()) / smallest if smallest > 0 else None,
        layers=tuple((float(row.min()), float(row.mean()), float(row.max())) for row in shares),
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report as tables."""
    console = console or Console()
    budgets = report.budgets
    fields = _make_table("profile", "")
    for name, value in report.profile.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} ({count})" for key, count in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        fields.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    console.print(fields)

    served = _make_table(f"budgets as served, ratio {budgets.ratio:g}, segment {budgets.segment}", "")
    served.add_row("tokens kept per segment: min", str(budgets.min))
    served.add_row("median", f"{budgets.median:g}")
    served.add_row("max", str(budgets.max))
    served.add_row("memory kept", f"{budgets.memory_kept:.4f}")
    served.add_row("span of mean shares", "-" if budgets.span is None else f"{budgets.span:.1f}x")
    console.print(served)

    layers = _make_table("layer", "min share", "mean", "max")
    for number, shares in enumerate(budgets.layers):
        layers.add_row(str(number), *(f"{share:.3f}" for share in shares))
    console.print(layers)

    if report.stability is not None:
        print_stability(report.stability, console)

    if report.held_out is not None:
        trained = _make_table("training, means over layers", "")
        for name, value in report.held_out.items():
            trained.add_row(name, f"{value:.3f}")
        console.print(trained)

    title = "reclaimed share of the KV cache"
    groups = _make_table("heads per group", "as calibrated", "as served", title=title)
    for entry in report.reclaimed:
        name = f"{entry.heads_per_group} {entry.order}"
        last = entry.order == ORDERS[-1]
        groups.add_row(name, f"{entry.calibrated:.3f}", f"{entry.served:.3f}", end_section=last)
    console.print(groups)


def print_roles(roles: RoleReport | None, console: Console | None = None) -> None:
    """Print the roles of heads as tables: all heads, the pivots, and role counts at other thresholds."""
    console = console or Console()
    if roles is None:
        console.print("roles of heads: the profile has no statistics of them; calibrate again")
        return
    columns = ("layer", "head", "role", "stability", "similarity", "watched by", "coverage")
    heads = _make_table(*columns, title="roles of heads")
    for row in roles.heads:
        pivot = "-" if row.watched_by is None else str(row.watched_by)
        numbers = (_format_number(row.stability), _format_number(row.similarity), pivot, _format_number(row.coverage))
        heads.add_row(str(row.layer), str(row.head), row.role, *numbers)
    console.print(heads)

    pivots = _make_table("pivot", "layer", "head", "coverage with those before it")
    for number, pivot_row in enumerate(roles.pivots, 1):
        pivots.add_row(str(number), str(pivot_row.layer), str(pivot_row.head), _format_number(pivot_row.coverage))
    console.print(pivots)

    counts = _make_table("thresholds", *ROLES, title="heads by role")
    for entry in roles.counts:
        name = "as calibrated" if entry.tau is None else f"{entry.tau:g}"
        counts.add_row(name, *(str(count) for count in entry.heads))
    console.print(counts)


def print_stability(stability: Stability, console: Console) -> None:
    """Print the stability of a profile as a table."""
    table = _make_table(f"stability over {stability.samples} samples, {len(stability.tasks)} tasks", "")
    table.add_row("rank correlation of heads, two halves of the samples", _format_number(stability.halves))
    table.add_row("between tasks: lowest", _format_number(stability.tasks_lowest))
    table.add_row("between tasks: mean", _format_number(stability.tasks_mean))
    table.add_row(f"heads with sigma < {STEADY:g}", f"{stability.steady:.1%}")
    console.print(table)


def _make_table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number and name else "left", overflow="fold")
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""Sections for the folders that `benchmarks.multi_turn` wrote."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import SettingsError
from benchmarks.multi_turn import tables
from benchmarks.multi_turn.plots import PLOTS
from benchmarks.multi_turn.store import MANIFEST, Store
from benchmarks.report.section import Figure, Section

PATTERN = "multi-turn*"
COMMAND = "python -m benchmarks.multi_turn --shape chat"


def sections(results: Path) -> list[Section]:
    """A section that compares all folders, then one for each folder; without folders, one section that says so."""
    folders = sorted(path for path in results.glob(PATTERN) if path.is_dir())
    if not folders:
        missing = f"{results.name}/{PATTERN} does not exist: the benchmark has not been run"
        return [Section("Conversations of many clients", command=COMMAND, missing=missing)]
    return [_overview(folders), *(_section(folder) for folder in folders)]


def _overview(folders: list[Path]) -> Section:
    """All folders in one table; those that cannot be read are left to their own sections."""
    stores = []
    for folder in folders:
        with contextlib.suppress(SettingsError):
            stores.append((folder.name, Store.load(folder).points))
    return Section(
        "Conversations of many clients",
        text=(
            "Medians over the runs that count. In brackets: times the token pool's figure in the same folder, with the "
            "same KV bytes and the same traffic. Above 1 is better for tokens per second, worse for times.",
        ),
        tables=(tables.overview(stores),),
    )


def _section(folder: Path) -> Section:
    title = f"Conversations of many clients: {folder.name}"
    try:
        store = Store.load(folder)
    except SettingsError as error:
        return Section(title, command=COMMAND, missing=f"{MANIFEST} or points cannot be read: {error}")
    settings, points = store.manifest["settings"], store.points
    facts = (
        ("date", str(store.manifest.get("date", "unknown"))),
        ("machine", machine(settings.get("machine", {}))),
        ("model", str(settings.get("model"))),
    )
    command = str(store.manifest.get("command", COMMAND))
    if not points:
        return Section(title, command=command, facts=facts, missing="no point is finished")
    counts = sorted({point.key.clients for point in points})
    by_round = [tables.by_round(points, count) for count in counts]
    figures = [Figure(folder / f"{name}.svg", caption) for name, caption in PLOTS.items()]
    starts = dict.fromkeys(point.start_up for point in points if point.start_up)
    return Section(
        title,
        text=(_text(settings),),
        command=command,
        facts=facts,
        tables=(tables.totals(points), *(table for table in by_round if table.rows)),
        figures=tuple(figure for figure in figures if figure.path.is_file()),
        notes=(*(f"Rejected: {line}" for line in tables.rejections(points)), *starts),
    )


def _text(settings: dict[str, Any]) -> str:
    rate = settings.get("request_rate")
    arrival = "requests sent as soon as a place is free" if rate == "inf" else f"{rate} requests per second"
    clients = ", ".join(str(count) for count in settings.get("clients", ()))
    return (
        f"Shape {settings.get('shape')}, {clients} clients, {settings.get('rounds')} rounds of "
        f"{settings.get('request_length')} new and {settings.get('output_length')} answered tokens, {arrival}; "
        f"{settings.get('kv_bytes')} of KV for every pool; runs of each point: {settings.get('repeats')}, the pools in "
        "turns, each beginning with an empty cache."
    )


def machine(facts: dict[str, Any]) -> str:
    """One line of what `machine.describe` gave."""
    if not facts:
        return "unknown"
    accelerators = ", ".join(facts.get("accelerators") or ()) or "no accelerator"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "sglang", "torch") if facts.get(name))
    return (
        f"{facts.get('processor')}, {facts.get('hardware_threads')} hardware threads, {facts.get('memory_gib')} GiB, "
        f"{accelerators}; {versions}"
    )

"""The table that is committed: what each kind of step asks of the device. A rise is a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("launches.json")

Found = dict[str, dict[str, Any]]
"""By phase: `Recorder.counts`, and under "faults" `Recorder.faults` where there are any."""


def read() -> Found:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(found: Found) -> None:
    """One line for each phase, so that a change is seen where it is."""
    lines = [f"  {json.dumps(phase)}: {json.dumps(counts)}" for phase, counts in sorted(found.items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rises(found: Found, known: Found) -> Iterator[str]:
    """What is more than in the table, in words; a phase that the table lacks is, too."""
    for phase, counts in found.items():
        if phase not in known:
            yield f"{phase}: not in the table"
            continue
        before = known[phase]
        for kind, (once, layered) in ((kind, both) for kind, both in counts.items() if kind != "faults"):
            was = before.get(kind, [0, 0])
            if once > was[0] or layered > was[1]:
                yield f"{phase}: {kind} {was[0]} and {was[1]} a layer have become {once} and {layered}"
        for fault, times in counts.get("faults", {}).items():
            if times > before.get("faults", {}).get(fault, 0):
                yield f"{phase}: {fault}, {times} times"


def falls(found: Found, known: Found) -> Iterator[str]:
    """What is less: worth a new table."""
    for phase, counts in found.items():
        for kind, was in known.get(phase, {}).items():
            now = counts.get(kind, {} if kind == "faults" else [0, 0])
            if now != was and not list(rises({phase: {kind: now}}, {phase: {kind: was}})):
                yield f"{phase}: {kind} {was} has become {now}"


def shown(found: Found) -> Iterator[str]:
    """Lines of a table for people: once a step + per layer."""
    kinds = ("triton", "other", "to_device", "to_host", "wait", "allocation")
    yield f"{'':60s}" + "".join(f"{kind:>14s}" for kind in kinds)
    for phase, counts in found.items():
        cells = (counts.get(kind, [0, 0]) for kind in kinds)
        yield f"{phase:60s}" + "".join(f"{f'{once:g}+{layered:g}':>14s}" for once, layered in cells)
        yield from (f"    {fault}, {times} times" for fault, times in counts.get("faults", {}).items())

"""The folder of a benchmark: `manifest.json`, `points.jsonl` (one finished point a line) and `rounds.csv`."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import write_whole
from benchmarks.harness.result_file import differences
from benchmarks.multi_turn.measures import flat, rounds
from benchmarks.multi_turn.point import Point

MANIFEST, POINTS, ROUNDS = "manifest.json", "points.jsonl", "rounds.csv"


class Store:
    """Finished points on disk. `points` holds them in the order in which they were measured."""

    def __init__(self, folder: Path, manifest: dict[str, Any], points: list[Point]) -> None:
        self.folder, self.manifest, self.points = folder, manifest, points

    @classmethod
    def open(cls, folder: Path, manifest: dict[str, Any]) -> Store:
        """The folder with what it holds already, or a new one.

        Args:
            manifest: `settings` decide whether points may stand together; the rest is for readers.

        Raises:
            SettingsError: the folder holds points of other settings, or something that is not a benchmark.
        """
        settings = manifest["settings"]
        known = folder / MANIFEST
        if known.is_file():
            before, points = _manifest(folder), _read_points(folder / POINTS)
            changed = differences(before["settings"], settings)
            if not changed:
                # Without the rest of a line that was cut short, so that the next point stands on a line of its own.
                write_whole(folder / POINTS, "".join(_line(point) for point in points))
                return cls(folder, before, points)
            if points:
                raise SettingsError(
                    f"{folder} holds points of other settings ({changed}): choose another --output, or remove it"
                )
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(f"{folder} exists and is no benchmark's folder: choose another --output")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(known, json.dumps(manifest, indent=2) + "\n")
        return cls(folder, manifest, [])

    @classmethod
    def load(cls, folder: Path) -> Store:
        """A folder to read from. Raises SettingsError when it is no benchmark's."""
        return cls(folder, _manifest(folder), _read_points(folder / POINTS))

    def add(self, point: Point) -> None:
        """Keep a finished point; it is on disk when this returns."""
        with (self.folder / POINTS).open("a") as file:
            file.write(_line(point))
            file.flush()
            os.fsync(file.fileno())
        self.points.append(point)
        self.write_csv()

    def write_csv(self) -> None:
        """One row for each round of each point; a point that was rejected has its reason in every row."""
        rows: list[dict[str, str]] = []
        for point in self.points:
            key = {"pool": point.key.pool, "clients": str(point.key.clients), "run": str(point.key.repeat + 1)}
            reason = {"rejected": point.rejected or ""}
            rows += [
                key
                | {"round": str(number + 1)}
                | {name: _text(value) for name, value in flat(of_round).items()}
                | reason
                for number, of_round in rounds(point).items()
            ] or [key | reason]
        names = max((list(row) for row in rows), key=len, default=[])
        with (self.folder / ROUNDS).open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _text(value: float) -> str:
    """Four significant digits, counts in full, empty where there is no value."""
    return str(value) if isinstance(value, int) else "" if math.isnan(value) else f"{value:.4g}"


def _line(point: Point) -> str:
    return json.dumps(point.to_json(), separators=(",", ":")) + "\n"


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise SettingsError(f"{folder} has no readable {MANIFEST}: it is no benchmark's folder") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise SettingsError(f"{folder / MANIFEST} is not a benchmark's")
    return manifest


def _read_points(path: Path) -> list[Point]:
    """All points but a last line that was cut short: the run was killed while it wrote it."""
    points: list[Point] = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines):
        try:
            points.append(Point.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            if number < len(lines) - 1:
                raise SettingsError(f"{path}: line {number + 1} is not a point") from None
    return points

"""How evenly each placement of heads loads tensor-parallel ranks, on measured profiles: arithmetic, no GPU.

    python -m benchmarks.fairkv [--json] [--profiles FILE.npz | BUNDLED_FOLDER] [--ratio 0.3] [--segment 256]

Profiles are those of tests/data, evictable share (four scorers, three models, two scopes), or those of a folder
SCORER/MODEL/profile*.npz of measured files. Kept counts are fitted to the ratio in the profile's own scope. Weights are
those of the three models; gemma-3's layers with a sliding window count as weights alone. Writes every profile, mode and
number of ranks, a table of batches and contexts for one profile, and the image of benchmarks/fairkv/README.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.fairkv.copying import MODES, place_any
from benchmarks.fairkv.evenness import Evenness, busy_limit, compare_modes, evenness, plot_modes
from benchmarks.harness.command import command
from benchmarks.harness.files import write_whole
from benchmarks.harness.plots import save_plot
from calib.measured import load_measured
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.profiles.budgets import fit_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "tests" / "data" / "measured_profiles.npz"
OUTPUT = ROOT / "benchmarks" / "results" / "fairkv.json"
IMAGE = ROOT / "benchmarks" / "results" / "fairkv-busy.png"
PICTURED = "keydiff/llama-3.1-8b-instruct/layer"
RANKS = (2, 4, 8)
BATCHES, CONTEXTS = (1, 8, 32, 64), (4096, 16384, 32768)
FINE_SEGMENT = 16 * 1024
"""Kept counts fitted to it differ by a thousandth of the whole: what budgets would be without rounding."""

GEMMA = CostModel(
    hidden=3840,
    head_dim=256,
    q_per_kv=2,
    segment=256,
    # 48 feed-forward blocks, the output projection, and the attention of the 40 layers with a sliding window.
    other_bytes=2 * 3840 * (48 * 3 * 15360 + 262208 + 40 * 256 * 2 * (16 + 8)),
)


def load_profiles(path: Path) -> dict[str, np.ndarray]:
    """Mean evictable share [layers, heads] by SCORER/MODEL/SCOPE."""
    if path.is_dir():
        files = sorted(path.glob("*/*/profile*.npz"))
        measured = {file: load_measured(file) for file in files}
        return {
            f"{found.scorer}/{file.parent.name}/{found.scope}": found.evictable.mean(axis=0)
            for file, found in measured.items()
        }
    with np.load(path) as archive:
        return {name.removesuffix("/evictable"): archive[name] for name in archive.files if name.endswith("/evictable")}


def cost_of(name: str, segment: int) -> CostModel:
    """The model of a profile SCORER/MODEL/SCOPE, at the default batch and context."""
    path = BUNDLED_FOLDER / "configs" / f"{name.split('/')[1]}.json"
    return (
        CostModel.from_config(json.loads(path.read_text()), segment)
        if path.is_file()
        else replace(GEMMA, segment=segment)
    )


def measure(shares: np.ndarray, name: str, ratio: float, segment: int) -> dict[int, dict[str, object]]:
    """By ranks: the figures of each mode, and what bounds them."""
    scope = name.split("/")[2]
    kept, fine = (fit_kept(shares, ratio, length, scope) for length in (segment, FINE_SEGMENT))
    cost = cost_of(name, segment)
    found: dict[int, dict[str, object]] = {}
    for ranks in RANKS:
        finer = {mode: place_any(fine, ranks, mode) for mode in MODES}
        free = {mode: place_any(kept, ranks, mode) for mode in MODES}
        found[ranks] = {
            "busy_limit": busy_limit(kept, ranks),
            "modes": compare_modes(kept, ranks, 1, cost),
            "free_weights": {mode: evenness(placement, free["none"], cost).busy for mode, placement in free.items()},
            "two_places": evenness(place_any(kept, ranks, "split", extra_places=2), free["none"], cost).busy,
            "unrounded": {mode: evenness(placement, finer["none"], cost).busy for mode, placement in finer.items()},
        }
    return found


def by_load(shares: np.ndarray, name: str, ratio: float, segment: int) -> list[dict[str, object]]:
    """`split` for every batch and context: what the planner takes, and what it gains."""
    kept = fit_kept(shares, ratio, segment, name.split("/")[2])
    rows = []
    for ranks in RANKS:
        for batch in BATCHES:
            for context in CONTEXTS:
                cost = replace(cost_of(name, segment), batch=batch, context=context)
                none, split = place_any(kept, ranks, "none"), place_any(kept, ranks, "split", cost=cost)
                setting = {"profile": name, "ranks": ranks, "batch": batch, "context": context}
                rows.append(setting | rounded(evenness(split, none, cost)))
    return rows


def rounded(entry: Evenness) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(entry).items()}


def show(found: dict[str, dict[int, dict]], console: Console) -> None:
    figures = ("busy", "busy_worst", "busy_whole", "busy_net", "busy_step", "capacity", "speedup")
    for ranks in RANKS:
        table = Table(title=f"{ranks} ranks, {len(found)} profiles: min, median, max")
        for name in ("mode", "unrounded", "free weights", *figures):
            table.add_column(name, no_wrap=True)
        for mode in MODES:
            entries = [profile[ranks]["modes"][mode] for profile in found.values()]
            columns = [
                [profile[ranks][kind][mode] for profile in found.values()] for kind in ("unrounded", "free_weights")
            ]
            columns += [[getattr(entry, name) for entry in entries] for name in figures]
            table.add_row(mode, *(f"{min(c):.3f} {np.median(c):.3f} {max(c):.3f}" for c in columns))
        limits = [profile[ranks]["busy_limit"] for profile in found.values()]
        table.caption = f"limit of busy in whole units: {min(limits):.3f} {np.median(limits):.3f} {max(limits):.3f}"
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--image", type=Path, default=IMAGE)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    options = parser.parse_args()
    with command("fairkv"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Compute, write, draw and print. Raises RaggedConfigError."""
    profiles = load_profiles(options.profiles)
    found = {name: measure(shares, name, options.ratio, options.segment) for name, shares in profiles.items()}
    rows = by_load(profiles[PICTURED], PICTURED, options.ratio, options.segment)
    kept = fit_kept(profiles[PICTURED], options.ratio, options.segment, PICTURED.split("/")[2])
    cost = cost_of(PICTURED, options.segment)
    title = f"{PICTURED}, ratio {options.ratio:g}, batch {cost.batch}, context {cost.context}"
    modes = {ranks: found[PICTURED][ranks]["modes"] for ranks in RANKS}
    save_plot(plot_modes(kept, modes, 1, cost, title), options.image)
    document = {
        "settings": {"ratio": options.ratio, "segment": options.segment, "batch": cost.batch, "context": cost.context},
        "profiles": {
            name: {ranks: _plain(entry) for ranks, entry in by_ranks.items()} for name, by_ranks in found.items()
        },
        "loads": rows,
    }
    text = json.dumps(document, separators=(",", ":"))
    write_whole(options.output, text + "\n")
    if options.json:
        print(text)
    else:
        show(found, Console())


def _plain(entry: dict) -> dict[str, object]:
    shares = {
        kind: {mode: round(value, 4) for mode, value in entry[kind].items()} for kind in ("free_weights", "unrounded")
    }
    limits = {kind: round(entry[kind], 4) for kind in ("busy_limit", "two_places")}
    return limits | shares | {"modes": {mode: rounded(figures) for mode, figures in entry["modes"].items()}}


if __name__ == "__main__":
    main()

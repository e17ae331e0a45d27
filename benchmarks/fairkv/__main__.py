"""How evenly each placement of heads loads tensor-parallel ranks, on measured profiles: arithmetic, no GPU.

    python -m benchmarks fairkv [--json] [--ratio 0.3] [--segment 256]

Profiles are those of tests/data, evictable share: four scorers, three models, two scopes. Kept counts are fitted to the
ratio in the profile's own scope. Weights are those of the three models; gemma-3's layers with a sliding window count as
weights alone. Prints figures over profiles by mode and number of ranks, and those of one profile by batch and context.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.fairkv.evenness import busy_limit, compare_modes, evenness
from benchmarks.harness.command import command
from benchmarks.harness.options import new_parser
from benchmarks.harness.table import Table
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.planner import MODES, plan_placement
from sgl_ragged.profiles.budgets import fit_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER

PROFILES = Path(__file__).parents[2] / "tests" / "data" / "measured_profiles.npz"
BY_LOAD = "keydiff/llama-3.1-8b-instruct/layer"
"""The profile that is shown by batch and context."""

RANKS = (2, 4, 8)
BATCHES, CONTEXTS = (1, 8, 32, 64), (4096, 16384, 32768)
FIGURES = ("busy", "busy_worst", "busy_whole", "busy_net", "busy_step", "capacity", "speedup")
FINE_SEGMENT = 16 * 1024
"""Kept counts fitted to it differ by a thousandth of the whole: budgets as they would be without rounding."""

GEMMA = CostModel(
    hidden=3840,
    head_dim=256,
    q_per_kv=2,
    segment=256,
    # 48 feed-forward blocks, the output projection, and the attention of the 40 layers with a sliding window.
    other_bytes=2 * 3840 * (48 * 3 * 15360 + 262208 + 40 * 256 * 2 * (16 + 8)),
)


def load_profiles() -> dict[str, np.ndarray]:
    """Load the mean evictable share [layers, heads] by SCORER/MODEL/SCOPE."""
    with np.load(PROFILES) as archive:
        return {name.removesuffix("/evictable"): archive[name] for name in archive.files if name.endswith("/evictable")}


def cost_of(name: str, segment: int) -> CostModel:
    """The model of a profile SCORER/MODEL/SCOPE, at the default batch and context."""
    path = BUNDLED_FOLDER / "configs" / f"{name.split('/')[1]}.json"
    if not path.is_file():
        return replace(GEMMA, segment=segment)
    return CostModel.from_config(json.loads(path.read_text()), segment)


def measure(shares: np.ndarray, name: str, ratio: float, segment: int) -> dict[str, dict[str, float]]:
    """Figures of one profile, by "RANKS ranks, MODE".

    unrounded: busy of budgets before they are rounded to units. free_weights: busy where extra places cost nothing.
    limit: the highest busy in whole units.
    """
    scope, cost = name.split("/")[2], cost_of(name, segment)
    kept, fine = (fit_kept(shares, ratio, length, scope) for length in (segment, FINE_SEGMENT))
    found = {}
    for ranks in RANKS:
        rounded, exact = ({mode: plan_placement(counts, ranks, mode) for mode in MODES} for counts in (kept, fine))
        for mode, entry in compare_modes(kept, ranks, cost).items():
            found[f"{ranks} ranks, {mode}"] = {
                "unrounded": evenness(exact[mode], exact["none"], cost).busy,
                "free_weights": evenness(rounded[mode], rounded["none"], cost).busy,
                **{figure: getattr(entry, figure) for figure in FIGURES},
                "limit": busy_limit(kept, ranks),
            }
    return found


def by_load(shares: np.ndarray, name: str, ratio: float, segment: int) -> list[dict[str, Any]]:
    """Figures of `split` for every number of ranks, batch and context."""
    kept = fit_kept(shares, ratio, segment, name.split("/")[2])
    rows = []
    for ranks in RANKS:
        none = plan_placement(kept, ranks, "none")
        for batch in BATCHES:
            for context in CONTEXTS:
                cost = replace(cost_of(name, segment), batch=batch, context=context)
                split = evenness(plan_placement(kept, ranks, "split", cost=cost), none, cost)
                rows.append({"ranks": ranks, "batch": batch, "context": context, **asdict(split)})
    return rows


def tables(found: dict[str, dict[str, dict[str, float]]], loads: list[dict[str, Any]]) -> list[Table]:
    def spread(values: Iterable[float]) -> str:
        every = list(values)
        return f"{min(every):.3f} {np.median(every):.3f} {max(every):.3f}"

    keys, names = next(iter(found.values())), ("unrounded", "free_weights", *FIGURES, "limit")
    rows = [[key, *(spread(one[key][name] for one in found.values()) for name in names)] for key in keys]
    heads = [name.replace("_", " ") for name in ("ranks, mode", *names)]
    made = [Table(f"{len(found)} profiles: min, median, max; bytes, not times", heads, rows)]
    columns = ("places", "busy", "busy_net", "speedup")
    rows = [
        [f"{one['ranks']} ranks, {one['batch']} x {one['context']}", *(f"{one[name]:.4g}" for name in columns)]
        for one in loads
    ]
    return [*made, Table(f"{BY_LOAD}, split", ("ranks, batch x context", *columns), rows)]


def main() -> None:
    parser = new_parser("fairkv", __doc__)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    options = parser.parse_args()
    with command("fairkv"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Compute and print. Raises RaggedConfigError."""
    profiles = load_profiles()
    found = {name: measure(shares, name, options.ratio, options.segment) for name, shares in profiles.items()}
    loads = by_load(profiles[BY_LOAD], BY_LOAD, options.ratio, options.segment)
    if options.json:
        print(json.dumps({"profiles": found, "loads": loads}))
        return
    for table in tables(found, loads):
        table.show(Console())


if __name__ == "__main__":
    main()

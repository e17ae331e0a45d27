"""How evenly CTA maps load the CTAs of decode attention, on measured profiles: arithmetic, no GPU.

    python -m benchmarks.cta_map [--json] [--ratios 0.3 0.25 0.5] [--batches 1 4 8 16 32 64]

Profiles are those of tests/data (four scorers, three models, two scopes, two shares). Kept counts are fitted to each
ratio at segments of 256 tokens, in the profile's own scope. Largest / mean is that of a
layer's CTAs; makespan is the waves model of `sgl_ragged.attention.cta_map.makespan`. Writes a row for each ratio, batch
and method, every layer of the first ratio for some batches and methods, and the images of benchmarks/cta_map/README.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cta_map.loads import MethodLoads, compare_methods, plot_loads
from benchmarks.harness.command import command
from benchmarks.harness.files import write_whole
from benchmarks.harness.plots import save_plot
from sgl_ragged.attention.cta_map import METHODS
from sgl_ragged.profiles.budgets import fit_kept

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "tests" / "data" / "measured_profiles.npz"
OUTPUT = ROOT / "benchmarks" / "results" / "cta-map.json"
IMAGES = ROOT / "benchmarks" / "results"
PICTURED = "keydiff/llama-3.1-8b-instruct/layer/evictable"
SEGMENT = 256
RESIDENT_CTAS = 396
"""132 multiprocessors with 3 CTAs each."""
LISTED_BATCHES, LISTED_METHODS = (4, 16, 64), ("uniform", "algorithm1", "exact")
"""What is written layer by layer; the rest only as rows, to keep the file small."""


@dataclass(frozen=True)
class Row:
    """One method over all layers of all profiles at one ratio and batch.

    `ctas_*`: CTAs of a layer per request. `waves_*`: of `RESIDENT_CTAS` CTAs, those of the whole batch. `filled_*`:
    CTAs over the places of these waves, 1 where the last wave is full. Largest / mean load and makespan over layers.
    """

    ratio: float
    batch: int
    method: str
    layers: int
    ctas_min: int
    ctas_median: float
    ctas_max: int
    waves_min: int
    waves_median: float
    waves_max: int
    filled_median: float
    filled_worst: float
    imbalance_median: float
    imbalance_worst: float
    makespan_median: float
    makespan_worst: float


def measure(ratio: float, batch: int) -> dict[str, dict[str, MethodLoads]]:
    """Loads by profile and method."""
    with np.load(PROFILES) as archive:
        return {
            name: compare_methods(fit_kept(archive[name], ratio, SEGMENT, name.split("/")[2]), batch, RESIDENT_CTAS)
            for name in archive.files
        }


def summarise(found: dict[str, dict[str, MethodLoads]], ratio: float, batch: int) -> list[Row]:
    """One row a method, all layers of all profiles taken together."""
    rows = []
    for method in next(iter(found.values())):
        parts = [loads[method] for loads in found.values()]
        everything = MethodLoads(*(np.concatenate([getattr(p, f) for p in parts]) for f in MethodLoads.__annotations__))
        waves = -(-everything.ctas * batch // RESIDENT_CTAS)
        filled = everything.ctas * batch / (waves * RESIDENT_CTAS)
        rows.append(
            Row(
                *(ratio, batch, method, len(everything.ctas)),
                waves_min=int(waves.min()),
                waves_median=float(np.median(waves)),
                waves_max=int(waves.max()),
                filled_median=round(float(np.median(filled)), 4),
                filled_worst=round(float(filled.min()), 4),
                **{name: round(value, 4) for name, value in asdict(everything.summary()).items()},
            )
        )
    return rows


def by_layer(found: dict[str, dict[str, MethodLoads]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Every layer of every profile for the methods listed: CTAs per request, largest / mean load, makespan."""
    return {
        name: {
            method: {
                "ctas": entry.ctas.tolist(),
                "imbalance": entry.imbalance.round(2).tolist(),
                "makespan": entry.makespan.round(2).tolist(),
            }
            for method, entry in loads.items()
            if method in LISTED_METHODS
        }
        for name, loads in found.items()
    }


def show(rows: list[Row], console: Console) -> None:
    for ratio in dict.fromkeys(row.ratio for row in rows):
        title = f"{rows[0].layers} layers, ratio {ratio:g}, {RESIDENT_CTAS} resident CTAs"
        caption = "CTAs of a layer per request, waves: min, median, max; waves filled, loads, makespan: median, worst"
        table = Table(title=title, caption=caption)
        for name in ("batch", "method", "CTAs", "waves", "filled", "largest / mean", "makespan"):
            table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for row in (row for row in rows if row.ratio == ratio):
            table.add_row(
                *(str(row.batch), row.method),
                f"{row.ctas_min} {row.ctas_median:g} {row.ctas_max}",
                f"{row.waves_min} {row.waves_median:g} {row.waves_max}",
                f"{row.filled_median:.0%} {row.filled_worst:.0%}",
                f"{row.imbalance_median:.2f} {row.imbalance_worst:.2f}",
                f"{row.makespan_median:.2f} {row.makespan_worst:.2f}",
                end_section=row.method == METHODS[0],
            )
        console.print(table)


def draw(ratio: float, batch: int) -> None:
    """The load of every CTA of one profile: benchmarks/results/cta-map-batch-BATCH.png."""
    with np.load(PROFILES) as archive:
        kept = fit_kept(archive[PICTURED], ratio, SEGMENT, PICTURED.split("/")[2])
    loads = compare_methods(kept, batch, RESIDENT_CTAS)
    title = f"{PICTURED}, ratio {ratio:g}, batch {batch} on {RESIDENT_CTAS} resident CTAs"
    figure = plot_loads(kept, {method: loads[method].counts for method in ("uniform", "exact")}, title)
    save_plot(figure, IMAGES / f"cta-map-batch-{batch}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=[0.3, 0.25, 0.5], metavar="R", help="layers: of the first"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    options = parser.parse_args()
    with command("cta_map"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Compute, write, draw and print. Raises RaggedConfigError."""
    rows, layers = [], {}
    for ratio in options.ratios:
        for batch in options.batches:
            found = measure(ratio, batch)
            rows += summarise(found, ratio, batch)
            if ratio == options.ratios[0] and batch in LISTED_BATCHES:
                layers[f"ratio {ratio:g}, batch {batch}"] = by_layer(found)
    for batch in (4, 64):
        draw(0.3, batch)
    settings = {"resident_ctas": RESIDENT_CTAS, "segment": SEGMENT, "profiles": str(PROFILES.relative_to(ROOT))}
    document = {"settings": settings, "rows": [asdict(row) for row in rows], "layers": layers}
    text = json.dumps(document, separators=(",", ":"))
    write_whole(options.output, text + "\n")
    if options.json:
        print(text)
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()

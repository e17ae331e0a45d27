"""How evenly each method of the CTA map loads the CTAs of decode attention, for a model on disk: arithmetic, no GPU.

python -m benchmarks.cta_map.one_model --model FOLDER [--profile FILE] [--batch 4] [--plot FILE.png] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cta_map.loads import MethodLoads, compare_methods, plot_loads
from benchmarks.harness.command import command
from benchmarks.harness.plots import save_plot
from sgl_ragged.attention.cta_map import METHODS
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_options import add_model_options, choose_kept, read_geometry


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=4, help="requests decoded at once (default: 4)")
    parser.add_argument("--sms", type=int, default=132, help="multiprocessors of the GPU (default: 132)")
    parser.add_argument("--ctas-per-sm", type=int, default=3, help="CTAs that each holds at once (default: 3)")
    parser.add_argument("--method", choices=METHODS, default="exact", help="shown per layer in --json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the load of every CTA: uniform, exact")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def show_cta_map(options: argparse.Namespace) -> None:
    """Print the comparison of methods, and draw it if a file is given.

    Raises:
        RaggedConfigError: an option is out of range.
    """
    for name in ("batch", "sms", "ctas_per_sm"):
        if getattr(options, name) < 1:
            raise RaggedConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    chosen = choose_kept(options, read_geometry(options))
    kept = chosen.kept
    resident = options.sms * options.ctas_per_sm
    loads = compare_methods(kept, options.batch, resident)
    if options.plot is not None:
        title = f"{options.model.name}, ratio {options.ratio:g}, batch {options.batch} on {resident} resident CTAs"
        save_plot(plot_loads(kept, {name: loads[name].counts for name in ("uniform", "exact")}, title), options.plot)
    if options.json:
        setting = {"source": chosen.source, "batch": options.batch, "resident_ctas": resident, "method": options.method}
        methods = {name: asdict(entry.summary()) for name, entry in loads.items()}
        print(json.dumps(setting | {"methods": methods, "layers": _by_layer(kept, loads[options.method])}))
        return
    print(chosen.source)
    Console().print(_table(loads, options.batch, resident))
    if options.plot is not None:
        print(f"plot: {options.plot}")


def _by_layer(kept: np.ndarray, loads: MethodLoads) -> list[dict[str, object]]:
    columns = {"kept": kept, "counts": loads.counts, "imbalance": loads.imbalance, "makespan": loads.makespan}
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def _table(loads: Mapping[str, MethodLoads], batch: int, resident: int) -> Table:
    title = f"batch {batch} on {resident} resident CTAs: a wave holds {resident / batch:.4g} per request"
    caption = "load: largest / mean of a layer's CTAs; makespan: over the least possible. Arithmetic, not times."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("CTAs min", "max", "load median", "worst", "makespan median", "worst"):
        table.add_column(name, justify="right")
    for method, entry in loads.items():
        s = entry.summary()
        figures = (s.imbalance_median, s.imbalance_worst, s.makespan_median, s.makespan_worst)
        table.add_row(method, str(s.ctas_min), str(s.ctas_max), *(f"{figure:.3f}" for figure in figures))
    return table


def main() -> None:
    """Ends with status 1 and one line on bad input."""
    options = options_parser().parse_args()
    with command("cta_map"):
        show_cta_map(options)


if __name__ == "__main__":
    main()

"""How evenly each placement of heads loads tensor-parallel ranks, for a model on disk: arithmetic, no GPU.

python -m benchmarks.fairkv.one_model --model FOLDER [--profile FILE] [--tp 2 4] [--plot FILE.png] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fairkv.evenness import Evenness, busy_limit, compare_modes, plot_modes
from benchmarks.harness.command import command
from benchmarks.harness.plots import save_plot
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.launch.model_options import add_model_options, choose_kept, read_geometry, read_sizes
from sgl_ragged.profiles.budgets import UNIT


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="ranks (default: those of 2, 4, 8 that divide)")
    parser.add_argument("--extra-places", type=int, default=1, help="per rank and layer, at most (default: 1)")
    parser.add_argument("--batch", type=int, default=32, help="requests decoded at once (default: 32)")
    parser.add_argument("--context", type=int, default=16384, help="tokens of each request (default: 16384)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw busy rates and the load of every rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def show_placements(options: argparse.Namespace) -> None:
    """Print the comparison of modes for each number of ranks, and draw it if a file is given.

    Raises:
        RaggedConfigError: an option is out of range, or the ranks do not divide the heads.
    """
    geometry = read_geometry(options)
    chosen = choose_kept(options, geometry)
    kept = chosen.kept
    cost = read_sizes(
        options.model, lambda config: CostModel.from_config(config, options.segment, options.batch, options.context)
    )
    sizes = options.tp or [ranks for ranks in (2, 4, 8) if geometry.num_heads % ranks == 0]
    if not sizes:
        raise RaggedConfigError(f"none of 2, 4 and 8 ranks divide {geometry.num_heads} heads: give --tp")
    found = {ranks: compare_modes(kept, ranks, options.extra_places, cost) for ranks in sizes}
    if options.plot is not None:
        title = f"{options.model.name}, ratio {options.ratio:g}, segments of {options.segment}"
        save_plot(plot_modes(kept, found, options.extra_places, cost, title), options.plot)
    if options.json:
        by_ranks = {
            str(ranks): {"busy_limit": busy_limit(kept, ranks), "modes": {m: asdict(e) for m, e in modes.items()}}
            for ranks, modes in found.items()
        }
        print(json.dumps({"source": chosen.source, "cost": asdict(cost), "tp": by_ranks}))
        return
    console = Console()
    print(chosen.source)
    for ranks, modes in found.items():
        console.print(_table(modes, ranks, busy_limit(kept, ranks), cost))
    print(
        "busy: mean / largest load of the ranks over all layers, in the worst layer, of all layers together (FairKV\n"
        "Eq. 5), with extra weights as time lost, and of whole steps with all weights. capacity, speed-up: over none,\n"
        "by bytes. Arithmetic, not times."
    )
    if options.plot is not None:
        print(f"plot: {options.plot}")


def _table(modes: Mapping[str, Evenness], ranks: int, limit: float, cost: CostModel) -> Table:
    setting = (
        f"batch {cost.batch}, context {cost.context}; no placement in units of {UNIT} tokens exceeds busy {limit:.3f}"
    )
    table = Table(title=f"{ranks} ranks, {setting}", title_justify="left")
    table.add_column("mode", no_wrap=True)
    for name in ("places", "busy", "worst", "whole", "net", "step", "capacity", "extra MiB", "speed-up"):
        table.add_column(name, justify="right")
    for mode, entry in modes.items():
        figures = (entry.busy, entry.busy_worst, entry.busy_whole, entry.busy_net, entry.busy_step, entry.capacity)
        table.add_row(
            *(mode, str(entry.places), *(f"{figure:.3f}" for figure in figures)),
            *(f"{entry.extra_bytes / 2**20:.0f}", f"{entry.speedup:.3f}"),
        )
    return table


def main() -> None:
    """Ends with status 1 and one line on bad input."""
    options = options_parser().parse_args()
    with command("fairkv"):
        show_placements(options)


if __name__ == "__main__":
    main()

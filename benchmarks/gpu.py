"""Checks the Triton kernels on a GPU against float64 and times them. gpu_blocks/README.md explains the blocks.

    python benchmarks/gpu.py [--output DIR] [--json] [--blocks correctness,decode,...] [--seconds 420]
    python benchmarks/gpu.py --dry-run      every case on paper, no GPU

Needs torch, triton, numpy and this repository; uses FlashInfer where it can be imported. Writes DIR/gpu.json after
every block. The exit status is 1 if anything that was checked is wrong or a block failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a file, Python looks beside it, where names like `launch` are taken; everything is imported from the root.
ROOT = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    sys.path[0] = ROOT

from benchmarks.gpu_blocks import dry_run  # noqa: E402
from benchmarks.gpu_blocks.record import COMPUTED, Record  # noqa: E402

BLOCKS = (
    "bandwidth",
    "occupancy",
    "correctness",
    "decode",
    "formats",
    "extend",
    "seal",
    "append",
    "beside",
    "overhead",
)
"""The first two take seconds, and the others need them; those are in the order of their importance."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print the results file at the end")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="comma-separated; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=420, help="time for everything (default: %(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="compute what would be measured; needs no GPU")
    # For the processes that this script starts.
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--correctness-case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.blocks = options.blocks.split(",")
    unknown = set(options.blocks) - set(BLOCKS)
    if unknown:
        parser.error(f"unknown blocks: {', '.join(sorted(unknown))}; known: {', '.join(BLOCKS)}")
    options.blocks = [block for block in BLOCKS if block in options.blocks]
    return options


def run_dry(options: argparse.Namespace) -> int:
    record = Record(options.output)
    record.start(COMPUTED, blocks=options.blocks, assumed=dry_run.ASSUMED)
    for name in options.blocks:
        if name not in dry_run.BLOCKS:
            record.set_block(name, {"status": COMPUTED, "rows": [], "note": "nothing to compute ahead"})
            continue
        rows = dry_run.BLOCKS[name]()
        record.set_block(name, {"status": COMPUTED, "rows": rows})
        dry_run.show_block(name, rows)
    return 0


def main() -> int:
    options = parse()
    if options.dry_run:
        status = run_dry(options)
    else:
        from benchmarks.gpu_blocks import runner

        status = runner.run(options, Path(__file__).resolve())
    if options.json and not options.child:
        print(Record(options.output).path.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())

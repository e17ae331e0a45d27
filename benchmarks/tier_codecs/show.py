"""The table and the plot of results: python -m benchmarks.tier_codecs.show FILE.json ... [--plot FILE.png]"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.tier_codecs.results import Result, draw, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="of all files together")
    options = parser.parse_args()
    found: list[Result] = []
    for path in options.files:
        try:
            own = [Result(**one) for one in json.loads(path.read_text())["results"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"tier_codecs.show: {path} cannot be read as results of benchmarks.tier_codecs ({error!r})")
        table(own).show(Console())
        found += own
    if options.plot is not None:
        draw(found, options.plot)


if __name__ == "__main__":
    main()

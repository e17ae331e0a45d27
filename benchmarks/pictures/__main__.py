"""Write the pictures of the pages to docs/pictures, or check that the committed ones are what the code draws."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "pictures"

NAMES = ("segments", "request", "states", "budgets", "quality", "conversations", "requests", "positions")
"""Pictures; each is a module of this package with a function `draw`."""


def draw(name: str) -> str:
    """Return the contents of a picture's file."""
    return import_module(f"benchmarks.pictures.{name}").draw(ROOT)


def main(arguments: list[str] | None = None) -> int:
    """Write or check pictures; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} [all]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file differs")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}; names are {', '.join(NAMES)}")
    differing = []
    for name in options.names or NAMES:
        path, drawn = FOLDER / f"{name}.svg", draw(name)
        if not path.is_file() or path.read_text() != drawn:
            differing.append(path)
            if not options.check:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(drawn)
    for path in differing:
        print(f"{'differs' if options.check else 'wrote'} {path.relative_to(ROOT)}")
    if options.check and differing:
        print("run python -m benchmarks pictures", file=sys.stderr)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())

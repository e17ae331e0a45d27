"""`python -m calib`: calibrate a model."""

from __future__ import annotations

import argparse
import sys

from calib import run
from sgl_ragged.errors import RaggedConfigError


def main() -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    parser = argparse.ArgumentParser(prog="calib", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run,):
        command.add_parser(commands)
    options = parser.parse_args()
    try:
        options.run(options)
    except RaggedConfigError as error:
        sys.exit(f"calib: {error}")


if __name__ == "__main__":
    main()

"""Front end of the calibration tools: `python -m calib COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from calib import convert, inspect, run
from sgl_ragged.errors import RaggedConfigError

COMMANDS = (run, inspect, convert)
"""One module a command; each has `add_parser(commands)`, which sets `run` to a function of the parsed options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    parser = argparse.ArgumentParser(prog="python -m calib", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except RaggedConfigError as error:
        # Messages of libraries that ours quote may run over several lines.
        sys.exit(f"calib: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

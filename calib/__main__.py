"""Front end of the calibration tools: `python -m calib COMMAND`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from calib import convert, inspect, run
from calib.measure import KEPT
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
    except KeyboardInterrupt:
        sys.exit("calib: interrupted; what was recorded is kept, and the same command goes on from there")
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        sys.exit(f"calib: {' '.join(str(error).split())}: {KEPT}")


def is_full(error: Exception) -> bool:
    """True if a disk or a quota is full; safetensors hands the system's error on as text."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in full or any(
        os.strerror(number) in str(error) or f"os error {number})" in str(error) for number in full
    )


if __name__ == "__main__":
    main()

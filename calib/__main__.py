"""Front end of the calibration tools: `python -m calib COMMAND`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from calib import convert, inspect, quality, run
from calib.engine import RESUME_ADVICE
from sgl_ragged.errors import RaggedConfigError

COMMANDS = (run, quality, inspect, convert)
"""Modules of the commands. Each has `add_parser(commands)`, which sets the default `run`, a function of the options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input ends the process with status 1 and one line."""
    parser = argparse.ArgumentParser(prog="python -m calib", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except RaggedConfigError as error:
        # Errors may quote messages of libraries with several lines.
        sys.exit(f"calib: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("calib: interrupted; recordings are kept, and the same command resumes from them")
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        sys.exit(f"calib: {' '.join(str(error).split())}: {RESUME_ADVICE}")


def is_full(error: Exception) -> bool:
    """Return whether the error is about a full disk or quota. Errors of safetensors hold the system's error as text."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in full or any(
        os.strerror(number) in str(error) or f"os error {number})" in str(error) for number in full
    )


if __name__ == "__main__":
    main()

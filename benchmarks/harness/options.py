"""Command lines of benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.errors import SettingsError


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of `python -m benchmarks NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def chosen(flag: str, default: str) -> str:
    """The value of a flag that decides which other options this process's command has, whatever the others are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="chosen", default=default)
    return parser.parse_known_args(sys.argv[1:])[0].chosen


def flags(names: Iterable[str]) -> str:
    """Names of options as they are written."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raises SettingsError where one of these options is, or holds, less than 1; None is none."""
    for name in names:
        value = getattr(options, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one < 1:
                raise SettingsError(f"{flags([name])} must be at least 1, not {one}")


def recorded(options: argparse.Namespace) -> dict[str, Any]:
    """Options that change figures, the model and the machine, as plain values."""
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "json")}
    return settings | machine.model_settings(options.model) | {"machine": machine.describe()}

"""Packages that only the suites need, the group `suites` of pyproject.toml, imported when something asks for them."""

from __future__ import annotations

import importlib
from types import ModuleType

from benchmarks.accuracy.session import SuiteError

REMEDY = "run make setup, or pip install --group suites (pip 25.1 or later) in the repository's folder"


def imported(module: str) -> ModuleType:
    """The module of this dotted name. Raises SuiteError when its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SuiteError(f"{package} cannot be imported ({error}): {REMEDY}") from None

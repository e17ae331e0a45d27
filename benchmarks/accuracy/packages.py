"""Packages that only the suites need, imported when something asks for them."""

from __future__ import annotations

import importlib
from types import ModuleType

from benchmarks.accuracy.session import SuiteError


def imported(module: str) -> ModuleType:
    """The module of this dotted name. Raises SuiteError when its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SuiteError(f'{package} cannot be imported ({error}): pip install "sgl-ragged[suites]"') from None

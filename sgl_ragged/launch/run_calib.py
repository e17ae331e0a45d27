"""Run the calibrator that is installed with this package; started by `calibration_process` with `python -P`.

`python -m calib` would take a `calib` in the working folder first. Processes that the calibrator starts inherit
`sys.path`, so they find the same modules.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder that holds `sgl_ragged` and `calib`."""

if __name__ == "__main__":
    found = importlib.util.find_spec("calib")
    if found is None or found.origin != str(ROOT / "calib" / "__init__.py"):
        # PYTHONPATH names a folder with another one. Not done always: ROOT may hold packages named like Python's own.
        sys.path.insert(0, str(ROOT))
    runpy.run_module("calib", run_name="__main__", alter_sys=True)

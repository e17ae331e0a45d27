"""Runs `tests/kernels`, the Triton kernels in the interpreter, in a process of their own.

Triton decides when a kernel is decorated whether it will be interpreted; here it must not be, for the compile checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0

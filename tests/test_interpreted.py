"""Runs `tests/kernels`, the Triton kernels in the interpreter, in a process of their own.

Triton decides when a kernel is decorated whether it will be interpreted; here it must not be, for the compile checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import refuse_versions

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter(request):
    # One of the last files to run, when the other process of `make test` is done: both cores are free.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--durations=5",
        "tests/kernels",
    ]
    if request.config.getoption("thorough"):
        command.append("--thorough")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = own | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0


def test_versions_that_cannot_interpret_end_with_one_line():
    with pytest.raises(pytest.exit.Exception, match=r"fails with numpy 2\.4\.0: install numpy<2\.4, or triton>=3\.7$"):
        refuse_versions("3.6.0", "2.4.0")
    for triton, numpy in (("3.6.0", "2.3.5"), ("3.7.0", "2.5.0"), ("3.8.0", "2.3.5")):
        refuse_versions(triton, numpy)

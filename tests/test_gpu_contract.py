"""What the GPU path asks of the device, without one: the quick half of `make gpu-contract`.

It replaces parts of torch and Triton, so it runs in processes of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0


def test_the_harness_sees_what_it_is_there_for():
    run("tests.gpu_contract.self_check")


@pytest.mark.timeout(300)
def test_steps_ask_no_more_of_the_device_than_the_table_says():
    run("tests.gpu_contract", "--quick")

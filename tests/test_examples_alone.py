"""The programs in examples/ without a server: one line that says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if "def main" in path.read_text())


@pytest.mark.parametrize(
    "name", [PROGRAMS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in PROGRAMS[1:])]
)
def test_without_a_server(name):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ended = subprocess.run([sys.executable, EXAMPLES / name, "--url", url], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"no SGLang server answers at {url} (nothing listens there)")
    assert "Traceback" not in ended.stderr

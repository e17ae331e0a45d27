"""The demo ends its servers when it is interrupted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_process(sign, status):
    command = [sys.executable, "-m", "benchmarks", "demo", "--json"]
    demo = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not family and time.monotonic() < deadline:
            time.sleep(0.2)
            family = psutil.Process(demo.pid).children(recursive=True)
        assert family, "no server was started"
        time.sleep(3)
        family += psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(sign)
        assert demo.wait(timeout=60) == status
        assert not [member for member in family if member.is_running()]
    finally:
        demo.kill()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

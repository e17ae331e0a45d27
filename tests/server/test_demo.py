"""The demo says what it showed, and ends its servers when it is interrupted."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from benchmarks.demo import Asked, claim, show
from benchmarks.quality.facts import Interview, Question
from benchmarks.real_model import ROOT, ensure

pytestmark = pytest.mark.server


def answered(pool: str, held: int | None, back_s: float, answers: tuple[str, ...]) -> Asked:
    kept = None if held else (4, 51.5, 256, 256)
    return Asked(pool, 1000 if held else 3000, kept, answers, held, 2.0, back_s, 1 - back_s / 2)


def test_it_says_what_was_shown():
    questions = tuple(Question((1,), str(number)) for number in range(3))
    document = Interview("numbers", "python", tuple(range(50)), questions)
    found = [
        answered("a", 1, 2.0, ("1", "2")),
        answered("b", None, 0.2, ("1", "2")),
        answered("c", None, 0.2, ("1", "0")),
    ]
    options = SimpleNamespace(kv_bytes="1MiB", few=4, low=0.1)
    assert claim(found, document, options).splitlines() == [
        "Room: in the same 1MiB b holds 3.0 times as many tokens as SGLang's pool.",
        "Backend: an uncached document takes 1.00 times as long as on SGLang's.",
        "Cache: after 4 conversations the document comes back with 90% cached and 0.10 times its own first time "
        "(SGLang's pool: 0% cached and 1.00 times).",
        "Facts: 2 of 2 on SGLang's pool, 2 with b, 1 with c.",
    ]
    printed = io.StringIO()
    options.limit = 10
    show(found, document, options, Console(file=printed, width=200))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.getvalue().splitlines()]
    assert ["a", "all in 16 bits", "1000", "1", "2000", "2000", "0%"] in rows
    assert ["b", "4, 51.5, 256 of 256", "3000", "more than 10", "2000", "200", "90%"] in rows


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_process(sign, status):
    model = ensure(ROOT / "models" / "smollm2-135m")
    command = [sys.executable, "-m", "benchmarks", "demo", "--model", str(model), "--json"]
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

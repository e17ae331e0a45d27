"""Progress of a calibration where nobody watches a terminal."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from calib import progress
from calib.progress import Bars, PlainLines, Step, show_progress


def test_a_line_names_step_parts_and_times():
    step = Step("samples through SGLang", 28, began=100.0)
    assert step.line(130.0) == "calib: samples through SGLang: 0 of 28, 30 s elapsed, rest unknown"
    step.done = 7
    assert step.line(160.0) == "calib: samples through SGLang: 7 of 28, 1 min 0 s elapsed, about 3 min 0 s left"


def test_lines_come_by_time_and_not_by_parts():
    out, now = io.StringIO(), [0.0]
    lines = PlainLines(out, clock=lambda: now[0])
    lines.write_line()
    advance = lines.start("training gates, layers", 2)
    advance()
    assert out.getvalue() == ""
    now[0] = 5.0
    lines.write_line()
    advance()
    lines.write_line()
    assert out.getvalue() == "calib: training gates, layers: 1 of 2, 5 s elapsed, about 5 s left\n"


def test_a_step_that_does_not_advance_is_still_seen():
    class Out(io.StringIO):
        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    written, out = threading.Event(), Out()
    with PlainLines(out, every_s=0.01) as lines:
        lines.start("samples", 3)
        assert written.wait(60)
    assert out.getvalue().startswith("calib: samples: 0 of 3, ")
    assert not lines._thread.is_alive()


def test_bars_are_for_terminals(monkeypatch):
    for terminal, kind in ((True, Bars), (False, PlainLines)):
        monkeypatch.setattr(
            progress, "Console", lambda terminal=terminal, **_: Console(file=io.StringIO(), force_terminal=terminal)
        )
        with show_progress() as shown:
            assert type(shown) is kind
            shown.start("samples", 1)()

"""What a server says to command lines that it refuses, asked of the launcher alone: nothing is started.

As a program, in a process that has imported SGLang: reads command lines from a JSON file, writes an answer for each
to another.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.server_pool import ServerPool
from benchmarks.storm.features import ServerSettings

START_S = 120

OWN = "sgl_ragged: "
"""How lines begin in which the plugin refuses."""


def refusals(servers: ServerPool, asked: Sequence[ServerSettings]) -> list[str | None]:
    """For each server the line with which its launcher refuses, None where it would start."""
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "questions"), Path(folder, "answers")
        lines = [["--model-path", str(one.model), *one.flags] for one in asked]
        questions.write_text(json.dumps([(line, one.env) for line, one in zip(lines, asked, strict=True)]))
        command = [sys.executable, "-m", "benchmarks.storm.refusals", str(questions), str(answers)]
        done = servers.run(command, timeout=START_S + 2 * len(asked))
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(answers.read_text())


def refuses_in_one_line(servers: ServerPool, settings: ServerSettings) -> str:
    """What a real server says that is started so, "" if it is one line of the plugin's, without a traceback."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(settings.model), *settings.flags]
    done = servers.run(command, timeout=START_S, env=settings.env)
    own = [line for line in done.stderr.splitlines() if line.startswith(OWN)]
    if done.returncode == 0 or len(own) != 1 or "Traceback" in done.stderr:
        return f"status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    return ""


def _main(questions: Path, answers: Path) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    found: list[str | None] = []
    for line, _ in json.loads(questions.read_text()):
        try:
            prepare_server_args(line).resolve_once()
            found.append(None)
        except SystemExit as refused:
            found.append(str(refused.code))
        except Exception as error:
            # SGLang refuses by whatever exception comes to hand.
            found.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))

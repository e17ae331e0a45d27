"""Commands in pages and deployment files, and the options that their programs know."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

WITH_COMMANDS = ("sgl-ragged", "calib", "benchmarks")
"""Programs whose first word is a command with options of its own."""

STARTS = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:sgl-ragged |python3? (?:-m (?:sgl_ragged|calib|benchmarks|sglang)(?:[. ]\w|$)|benchmarks/))"
)
"""How a command begins whose options are checked."""

SELECTORS = ("--axis", "--shape")
"""Options of benchmarks whose value decides which other options there are."""

END = frozenset(";|&<>")
"""Characters at which a shell's command ends, or its output goes elsewhere."""


@dataclass(frozen=True)
class Command:
    """program: arguments for `python` that start it. options: the long and short options that the command names."""

    program: tuple[str, ...]
    options: tuple[str, ...]

    def unknown(self) -> set[str]:
        """Return options that the program's help does not list."""
        return set(self.options) - known_options(self.program)


def parse(line: str) -> Command | None:
    """Parse a command line of a shell; None where it starts no program of ours or SGLang's.

    An option's value that begins with a hyphen is quoted and holds a blank, so it is no option.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words = list(lexer)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        del words[0]
    words = words[: next((place for place, word in enumerate(words) if set(word) <= END), len(words))]
    if words[:1] == ["sgl-ragged"]:
        program, name, rest = ["-m", "sgl_ragged.cli"], "sgl-ragged", words[1:]
    elif words[1:2] == ["-m"] and len(words) > 2:
        program, name, rest = words[1:3], words[2], words[3:]
    elif len(words) > 1 and words[1].endswith(".py"):
        program, name, rest = words[1:2], words[1], words[2:]
    else:
        return None
    if name in WITH_COMMANDS and rest and re.fullmatch(r"[a-z_.]+", rest[0]):
        program, rest = [*program, rest[0]], rest[1:]
    for selector in set(SELECTORS) & set(rest):
        program = [*program, *rest[(at := rest.index(selector)) : at + 2]]
    options = [word.split("=")[0] for word in rest if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word)]
    return Command(tuple(program), tuple(options))


def known_options(program: tuple[str, ...]) -> frozenset[str]:
    """Return the options that `--help` of a program lists."""
    status, printed = _help_server().help(program)
    assert status == 0, f"{' '.join(program)} --help: {printed.strip().splitlines()[-1:]}"
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", printed))


class HelpServer:
    """A process that imports SGLang once and forks for each program that is asked for its help."""

    def __init__(self) -> None:
        environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._known: dict[tuple[str, ...], tuple[int, str]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.command_lines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        atexit.register(self._process.kill)

    def help(self, program: tuple[str, ...]) -> tuple[int, str]:
        """Return exit status and output of `python PROGRAM --help`."""
        if program not in self._known:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(program), file=self._process.stdin, flush=True)
            self._known[program] = tuple(json.loads(self._process.stdout.readline()))
        return self._known[program]


@functools.cache
def _help_server() -> HelpServer:
    return HelpServer()


def serve_helps() -> None:
    """Answer each line of standard input, a program, with exit status and output of its help."""
    for module in ("torch", "transformers", "sglang.srt.server_args"):
        importlib.import_module(module)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as printed:
            child = os.fork()
            if not child:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                os._exit(run_help(json.loads(line)))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            printed.seek(0)
            print(json.dumps((status, printed.read())), flush=True)


def run_help(program: list[str]) -> int:
    """Run a program with `--help` in this process; returns its exit status."""
    module, words = (program[1], program[2:]) if program[0] == "-m" else (None, program[1:])
    sys.argv = [module or program[0], *words, "--help"]
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program[0]).parent))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def page_commands(text: str) -> Iterator[str]:
    """Yield the commands of a page in Markdown: lines of code, fenced or indented, and code within sentences."""
    joined = text.replace("\\\n", " ")
    fenced = False
    for line in joined.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            if STARTS.match(line.strip()):
                yield line.strip()
        else:
            yield from (code for code in re.findall(r"`([^`]+)`", line) if STARTS.match(code))


if __name__ == "__main__":
    serve_helps()

"""The wheel as its users get it: built from the sdist, installed where nothing else is, and served with (`make wheel`).

    python -m tests.installed_wheel [--uv .uv/bin/uv]

Commands and server run outside of the repository, so that they import what the wheel holds. Ends with status 1 and one
line where something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.launch import serve
from tests.character_model import make_character_model

ROOT = Path(__file__).parent.parent

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--kv-bytes", "32MiB", "--max-running-requests", "4"),
    *("--kv-pool", "ragged", "--ragged-ratio", "0.15", "--ragged-profile", "uniform"),
)

PROMPT = [4 + place % 90 for place in range(600)]
"""Token ids of two finished segments and an open one."""

NOT_OF_THE_TREE = {"PYTHONPATH": ""}


class WheelError(Exception):
    """What is wrong, in one line."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The command's answer. Raises WheelError with the last line that it printed if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=os.environ | NOT_OF_THE_TREE)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise WheelError(f"{Path(command[0]).name} {command[1]} ended with {done.returncode}: {said[-1].strip()}")
    return done


def say(what: str, started: float) -> None:
    print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)


def build(uv: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(uv, "build", "--quiet", "--out-dir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def install(uv: Path, wheel: Path, folder: Path) -> Path:
    """The `bin` folder of a new environment with the wheel and what it asks for, resolved as in `make setup`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    overrides = folder.with_suffix(".overrides")
    overrides.write_text("\n".join(settings["override-dependencies"]))
    run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    resolved = ("--override", overrides, "--prerelease", settings["prerelease"])
    run(uv, "pip", "install", "--quiet", "--python", folder, "--compile-bytecode", *resolved, wheel)
    return folder / "bin"


def check_commands(bin_folder: Path, model: Path) -> None:
    """The console script answers, says nothing else, and is the wheel's."""
    found = Path(run(bin_folder / "python", "-c", "import sgl_ragged; print(sgl_ragged.__file__)").stdout.strip())
    if bin_folder.parent not in found.parents:
        raise WheelError(f"sgl_ragged is imported from {found}")
    if not (found.parent / "py.typed").exists():
        raise WheelError("the wheel has no py.typed")
    script = bin_folder / "sgl-ragged"
    layout = ("layout", "--model", model, "--kv-bytes", "32MiB", "--profile", "uniform")
    for arguments in (("--help",), ("check",), ("conflicts",), layout):
        done = run(script, *arguments)
        if done.stderr or not done.stdout:
            raise WheelError(f"sgl-ragged {arguments[0]} warns, or does not answer: {done.stderr.strip()[:300]}")


def check_server(python: Path, model: Path, log: Path) -> str:
    """Serve a prompt twice; returns the server's start-up line."""
    launcher = (str(python), "-m", "sglang.launch_server")
    server = serve(model, *FLAGS, log=log, launcher=launcher, env=NOT_OF_THE_TREE)
    with server as started, ServerClient(started.url) as client:
        first, again = (client.generate(PROMPT, 8, ignore_eos=True) for _ in range(2))
        summary = client.start_up_line()
    if first["text"] != again["text"] or len(first["output_ids"]) != 8:
        raise WheelError(f"two answers to one prompt: {first['text']!r}, {again['text']!r}")
    if again["meta_info"]["cached_tokens"] != 512:
        raise WheelError(f"{again['meta_info']['cached_tokens']} tokens of two segments were cached")
    if "ragged KV pool" not in summary:
        raise WheelError("the server does not say that its pool is ragged")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv", help="[.uv/bin/uv]")
    uv = parser.parse_args().uv.absolute()
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
            folder = Path(name)
            sdist, wheel = build(uv, folder / "dist")
            say(f"built {sdist.name} ({sdist.stat().st_size} bytes), {wheel.name} ({wheel.stat().st_size})", started)
            bin_folder = install(uv, wheel, folder / "environment")
            say("installed the wheel in an empty environment", started)
            model = make_character_model(folder / "model")
            check_commands(bin_folder, model)
            say("sgl-ragged --help, check, conflicts and layout answer", started)
            summary = check_server(bin_folder / "python", model, folder / "server.log")
            say(f"a server answered; {summary}", started)
    except (BenchmarkError, WheelError) as error:
        sys.exit(f"wheel: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

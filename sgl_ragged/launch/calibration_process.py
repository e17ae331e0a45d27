"""Runs `python -m calib run` for a server that has no profile yet: one at a time, and never longer than its starter.

The process inherits the lock of the profile, so no second one starts while it lives, and reads from a pipe that
ends with its parent, however that ends. Every process records in a folder of its own; what an earlier one left
there is taken over by the next, which holds the lock and so knows that its owner is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch import run_calib
from sgl_ragged.launch.model_source import load_tokenizer
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_cache import VARIABLE

PASSED_ON = (
    *("trust_remote_code", "revision", "tokenizer_path", "tokenizer_mode", "quantization", "load_format", "device"),
    *("json_model_override_args", "base_gpu_id", "download_dir", "model_loader_extra_config", "model_impl"),
    *("model_config_parser", "cpu_offload_gb"),
)
"""Settings of the server that its calibration must share, in addition to model, dtype and ranks."""

NEEDED = ("matplotlib", "rich", "scipy")
"""Packages that only calibration needs: the extra `calibrate` of this package."""

WAYS_OUT = "give a profile with --ragged-profile FILE, or serve with --ragged-profile uniform"


def calibrate(
    scorer: str, options: RaggedOptions, view: Any, geometry: ModelGeometry, path: Path, lock: int, ratio: float
) -> None:
    """Make the profile at `path`, whole or not at all; what was recorded survives an interruption.

    Args:
        view: SGLang's resolved settings.
        lock: file descriptor of the profile's lock, which the caller holds.
        ratio: kept / full KV bytes of the server, at which the profile's loss is measured.

    Raises:
        RaggedConfigError: calibration cannot start, or failed; the message names ways to serve without it.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RaggedConfigError(
            f"there is no profile of {view.model_path} yet, and calibrating it needs {', '.join(missing)}: install "
            f"sgl-ragged[calibrate], {WAYS_OUT}"
        )
    passed = {name: getattr(view, name) for name in PASSED_ON if getattr(view, name, None) not in (None, "", False)}
    try:
        # Also with --skip-tokenizer-init: the samples of calibration are texts.
        load_tokenizer(view.model_path, passed)
    except RaggedConfigError as error:
        raise RaggedConfigError(
            f"there is no profile of {view.model_path} yet, and it cannot be calibrated: {error}; or {WAYS_OUT}"
        ) from None
    say(
        f"no profile of {view.model_path} yet: calibrating {scorer}, once, before the server starts. It takes "
        f"minutes (SmolLM2-135M on two cores took seven) and is kept in {path} ({VARIABLE} names another folder). "
        f"--ragged-profile uniform serves at once, with equal budgets"
    )
    abandoned = _recordings(path)
    work = Path(tempfile.mkdtemp(prefix=f"{path.stem}.recordings-", dir=path.parent))
    made = work / "profile.safetensors"
    # Other nodes wait. More ranks than heads serve, but do not calibrate.
    local = view.tp_size * view.pp_size // view.nnodes
    ranks = next(ranks for ranks in (local, view.tp_size, 1) if ranks <= local and geometry.num_heads % ranks == 0)
    command = [
        *calibrator(),
        *("run", "--model", view.model_path, "--scorer", scorer),
        *("--segment", str(options.segment), "--dtype", str(view.dtype), "--tp", str(ranks)),
        *("--engine-args", json.dumps(passed, default=str), "--work", str(work), "-o", str(made)),
        *(("--scorer-weights", options.scorer_weights) if options.scorer_weights else ()),
        *(("--resume-from", *map(str, abandoned)) if abandoned else ()),
        *("--quality-ratios", str(ratio)),
        "--ends-with-input",
    ]
    began = time.monotonic()
    status = _run(command, lock)
    if status or not made.is_file():
        raise RaggedConfigError(f"the model could not be calibrated (status {status}, reason above): {WAYS_OUT}")
    made.replace(path)
    remove_recordings(path)
    say(f"calibrated in {time.monotonic() - began:.0f} s; the next start of this model finds {path}")


def calibrator() -> list[str]:
    """Return the start of a command line for the calibrator that is installed with this package.

    Raises:
        RaggedConfigError: it is not installed.
    """
    if not (run_calib.ROOT / "calib" / "__main__.py").is_file():
        raise RaggedConfigError(
            f"there is no calibrator beside this package in {run_calib.ROOT}: install sgl-ragged again, or {WAYS_OUT}"
        )
    return [sys.executable, "-P", str(Path(run_calib.__file__))]


def remove_recordings(path: Path) -> None:
    """Delete the recordings of a finished profile: the process that made it may have been ended before it did so.

    A cache that this process may read but not change keeps them; they only take room.
    """
    with contextlib.suppress(OSError):
        for folder in _recordings(path):
            shutil.rmtree(folder, ignore_errors=True)


def _recordings(path: Path) -> list[Path]:
    prefix = f"{path.stem}.recordings"
    return sorted(folder for folder in path.parent.iterdir() if folder.name.startswith(prefix))


def say(text: str) -> None:
    """Print a line for the user who starts the server."""
    print(f"sgl_ragged: {text}", file=sys.stderr, flush=True)


def _run(command: list[str], lock: int) -> int:
    """Run a command that holds the lock while it lives and ends with this process; return its exit status."""
    theirs, ours = os.pipe()
    try:
        # Its table goes where its progress goes: standard output is the caller's.
        process = subprocess.Popen(command, stdin=theirs, stdout=sys.stderr, pass_fds=(lock,))
    finally:
        os.close(theirs)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The child ends with the pipe. A traceback would tell the user nothing about Ctrl-C.
        os.close(ours)
        ours = -1
        process.wait()
        say("interrupted while calibrating; what was recorded is kept, and the next start goes on from it")
        raise SystemExit(130) from None
    finally:
        if ours >= 0:
            os.close(ours)
        process.wait()

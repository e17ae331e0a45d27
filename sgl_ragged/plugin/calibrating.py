"""Which profile and scorer a server gets: given, bundled, cached, or calibrated now, before the server starts."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sgl_ragged.bundled import find_bundled
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.plugin.options import CALIBRATED_SCORER, OTHER_SCORER, RaggedOptions
from sgl_ragged.profile import load_profile
from sgl_ragged.profile_cache import VARIABLE, ProfileKey, cache_folder, locked, weights_identity
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import check_weights

logger = logging.getLogger(__name__)

PASSED_ON = (
    *("trust_remote_code", "revision", "tokenizer_path", "quantization", "load_format", "device"),
    *("json_model_override_args", "base_gpu_id"),
)
"""Settings of the server that its calibration must share, beside model, dtype and ranks."""

NEEDED = ("matplotlib", "rich", "scipy")
"""Packages that only calibration needs: the extra `calibrate` of this package."""


def settle_profile(options: RaggedOptions, view: Any, geometry: ModelGeometry, share: float) -> tuple[str, str]:
    """The scorer that serves, and its profile: "uniform" or a path, perhaps of a profile still to be calibrated.

    Args:
        view: SGLang's resolved settings.
        share: of the tokens that are kept.

    Raises:
        RaggedConfigError: a profile cannot be read, or the scorer lacks weights that only a file can bring.
    """
    if options.scorer:
        check_weights(get_scorer(options.scorer), options.scorer_weights)
    if options.profile == "uniform":
        logger.warning(
            "--ragged-profile uniform: every head keeps the same share. On SmolLM2-135M at ratio 0.5 that lost 16 of "
            "88 facts; calibrated budgets of the same size lost none (docs/quality.md); use --ragged-profile auto"
        )
        return options.scorer or OTHER_SCORER, "uniform"
    if options.profile == "auto" and share == 1:
        # Nothing is dropped.
        return options.scorer or OTHER_SCORER, "uniform"
    if options.profile != "auto":
        return options.scorer or load_profile(options.profile).scorer, options.profile
    bundled = find_bundled(geometry.fingerprint, options.scorer or OTHER_SCORER)
    if bundled is not None:
        return options.scorer or OTHER_SCORER, str(bundled)
    if view.load_format == "dummy":
        logger.warning("random weights (--load-format dummy) are not calibrated: every head keeps the same share")
        return options.scorer or OTHER_SCORER, "uniform"
    key = _key(options, view, geometry)
    return key.scorer, str(key.path)


def _key(options: RaggedOptions, view: Any, geometry: ModelGeometry) -> ProfileKey:
    from calib.built_in import samples_hash

    return ProfileKey(
        model=view.model_path.rstrip("/").split("/")[-1],
        weights=weights_identity(model_folder(view)),
        fingerprint=geometry.fingerprint,
        scorer=options.scorer or CALIBRATED_SCORER,
        scorer_weights=options.scorer_weights or "",
        segment=options.segment,
        samples=samples_hash(),
        dtype=str(view.dtype),
    )


def calibrate_if_missing(scorer: str, profile: str, options: RaggedOptions, view: Any, geometry: ModelGeometry) -> None:
    """Make the profile that `settle_profile` chose, if it is one of the cache that is not there yet; takes minutes.

    Raises:
        RaggedConfigError: calibration fails; the message says how to serve without.
    """
    path = Path(profile)
    if path.parent != cache_folder() or path.is_file():
        return
    with locked(path, lambda: _say(f"another process is calibrating {view.model_path}; waiting for {path}")):
        if not path.is_file():
            _calibrate(scorer, options, view, geometry, path)


def model_folder(view: Any) -> Path:
    """Where the model's files are: its path, or the hub's snapshot of it."""
    folder = Path(view.model_path)
    if folder.is_dir():
        return folder
    from transformers.utils import cached_file

    found = cached_file(view.model_path, "config.json", revision=view.revision)
    return Path(found).parent


def _calibrate(scorer: str, options: RaggedOptions, view: Any, geometry: ModelGeometry, path: Path) -> None:
    """Make the profile at `path`, whole or not at all; what was recorded survives an interruption."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RaggedConfigError(
            f"there is no profile of {view.model_path} yet, and calibrating it needs {', '.join(missing)}: install "
            f"sgl-ragged[calibrate], give a profile with --ragged-profile FILE, or serve with --ragged-profile uniform"
        )
    _say(
        f"no profile of {view.model_path} yet: calibrating {scorer}, once, before the server starts. It takes "
        f"minutes (SmolLM2-135M on two cores took seven) and is kept in {path} ({VARIABLE} names another folder). "
        f"--ragged-profile uniform serves at once, with equal budgets"
    )
    # More ranks than heads serve, but do not calibrate.
    ranks = 1 if geometry.num_heads % view.tp_size else view.tp_size
    work, partial = path.with_suffix(".recordings"), path.with_suffix(".partial")
    passed = {name: getattr(view, name) for name in PASSED_ON if getattr(view, name, None) not in (None, "", False)}
    command = [
        *(sys.executable, "-m", "calib", "run", "--model", view.model_path, "--scorer", scorer),
        *("--segment", str(options.segment), "--dtype", str(view.dtype), "--tp", str(ranks)),
        *("--engine-args", json.dumps(passed), "--work", str(work), "-o", str(partial)),
        *(("--scorer-weights", options.scorer_weights) if options.scorer_weights else ()),
    ]
    began = time.monotonic()
    # Its table goes where its progress goes: standard output is the caller's.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if done.returncode:
        raise RaggedConfigError(
            f"the model could not be calibrated (status {done.returncode}, reason above): give a profile with "
            f"--ragged-profile FILE, or serve with --ragged-profile uniform"
        )
    partial.replace(path)
    shutil.rmtree(work, ignore_errors=True)
    _say(f"calibrated in {time.monotonic() - began:.0f} s; the next start of this model finds {path}")


def _say(text: str) -> None:
    print(f"sgl_ragged: {text}", file=sys.stderr, flush=True)

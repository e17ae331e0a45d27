"""Which profile and scorer a server gets: given, bundled, cached, or calibrated now, before the server starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.calibration_process import WAYS_OUT, calibrate, remove_recordings, say
from sgl_ragged.plugin.model_source import model_folder
from sgl_ragged.plugin.options import CALIBRATED_SCORER, OTHER_SCORER, RaggedOptions
from sgl_ragged.profiles.bundled import find_bundled
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.profile_cache import ProfileKey, cache_folder, locked, unwritable, weights_identity
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import check_weights

logger = logging.getLogger(__name__)


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
            "88 facts; calibrated budgets of the same size lost none (docs/evaluation.md); use --ragged-profile auto"
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

    try:
        weights = weights_identity(model_folder(view))
    except RaggedConfigError as error:
        raise RaggedConfigError(f"no profile can be kept for this model: {error}; or {WAYS_OUT}") from None
    return ProfileKey(
        model=view.model_path.rstrip("/").split("/")[-1],
        weights=weights,
        fingerprint=geometry.fingerprint,
        scorer=options.scorer or CALIBRATED_SCORER,
        scorer_weights=options.scorer_weights or "",
        segment=options.segment,
        samples=samples_hash(),
        dtype=str(view.dtype),
    )


def is_missing(profile: str) -> bool:
    """True for a profile that `settle_profile` chose and that is still to be calibrated."""
    path = Path(profile)
    return path.parent == cache_folder() and not path.is_file()


def calibrate_if_missing(scorer: str, profile: str, options: RaggedOptions, view: Any, geometry: ModelGeometry) -> None:
    """Make the profile that `settle_profile` chose, if it is one of the cache that is not there yet; takes minutes.

    Raises:
        RaggedConfigError: calibration fails; the message says how to serve without.
    """
    path = Path(profile)
    if path.parent != cache_folder():
        return
    if path.is_file():
        remove_recordings(path)
        return
    with locked(path, lambda: say(f"another process is calibrating {view.model_path}; waiting for {path}")) as lock:
        if not path.is_file():
            try:
                calibrate(scorer, options, view, geometry, path, lock)
            except OSError as error:
                raise unwritable(path.parent, error) from None

"""Choose a server's profile and scorer; calibrate the model before the server starts where its profile is missing."""

from __future__ import annotations

from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.calibration_process import WAYS_OUT, calibrate, remove_recordings, say
from sgl_ragged.launch.model_source import model_folder
from sgl_ragged.launch.options import CALIBRATED_SCORER, OTHER_SCORER, RaggedOptions
from sgl_ragged.profiles.built_in_samples import samples_identity
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.profile_cache import ProfileKey, is_cached, locked, unwritable, weights_identity
from sgl_ragged.profiles.profile_choice import (
    AUTO,
    CachedProfile,
    ProfileChoice,
    ProfileFile,
    ReadableProfile,
    Uniform,
    named_profile,
)
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import check_weights


def settle_profile(
    options: RaggedOptions, view: Any, geometry: ModelGeometry, share: float
) -> tuple[str, ProfileChoice]:
    """Return the scorer that serves, and where its budgets come from.

    Args:
        view: SGLang's resolved settings.
        share: of the tokens that are kept.

    Raises:
        RaggedConfigError: a profile cannot be read, none fits, or the scorer lacks weights that only a file can bring.
    """
    if options.scorer:
        check_weights(get_scorer(options.scorer), options.scorer_weights)
    other = options.scorer or OTHER_SCORER
    if options.profile != AUTO:
        named = named_profile(options.profile, geometry, other)
        if isinstance(named, ProfileFile):
            return options.scorer or load_profile(named.path).scorer, named
        return other, named
    if share == 1:
        return other, Uniform("every token is kept")
    if view.load_format == "dummy":
        return other, Uniform("random weights (--load-format dummy) are not calibrated")
    key = _key(options, view, geometry)
    return key.scorer, CachedProfile(key.path)


def _key(options: RaggedOptions, view: Any, geometry: ModelGeometry) -> ProfileKey:
    try:
        weights, samples = weights_identity(model_folder(view)), samples_identity()
    except (RaggedConfigError, OSError) as error:
        raise RaggedConfigError(f"no profile can be kept for this model: {error}; or {WAYS_OUT}") from None
    return ProfileKey(
        model=view.model_path.rstrip("/").split("/")[-1],
        weights=weights,
        fingerprint=geometry.fingerprint,
        scorer=options.scorer or CALIBRATED_SCORER,
        scorer_weights=options.scorer_weights or "",
        segment=options.segment,
        samples=samples,
        dtype=str(view.dtype),
    )


def is_missing(profile: ProfileChoice) -> bool:
    """True for a profile that is still to be calibrated.

    Raises:
        RaggedConfigError: the cache's folder may not be entered.
    """
    return isinstance(profile, CachedProfile) and not is_cached(profile.path)


def calibrate_if_missing(
    scorer: str, profile: ProfileChoice, options: RaggedOptions, view: Any, geometry: ModelGeometry, ratio: float
) -> ReadableProfile:
    """Calibrate the model where its profile is missing, which takes minutes. Returns a choice that can be read.

    Args:
        view: SGLang's resolved settings.
        ratio: kept / full KV bytes of the server.

    Raises:
        RaggedConfigError: calibration fails, or the cache cannot be used; the message names ways to serve without it.
    """
    if not isinstance(profile, CachedProfile):
        return profile
    path = profile.path
    if is_cached(path):
        remove_recordings(path)
        return profile.file
    with locked(path, lambda: say(f"another process is calibrating {view.model_path}; waiting for {path}")) as lock:
        if not is_cached(path):
            try:
                calibrate(scorer, options, view, geometry, path, lock, ratio)
            except OSError as error:
                raise unwritable(path.parent, error) from None
    return profile.file

"""Choose the ratio by measured quality, for --ragged-quality."""

from __future__ import annotations

import math

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.calibrating import is_missing, settle_profile
from sgl_ragged.launch.conflicts import CODES, against
from sgl_ragged.launch.options import FITTED
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.mem_pool.slab_format import AUTO
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.profile_choice import Uniform
from sgl_ragged.profiles.quality import least_ratio

STEP = 0.001
"""Chosen ratios are multiples of this."""


def ratio_by_quality(start: ModelStart, kl: float) -> float:
    """Return the least ratio whose KL, measured with the start's profile or interpolated, is at most `kl`.

    Raises:
        RaggedConfigError: other flags say otherwise, or nothing was measured that answers.
    """
    options, flag = start.options, f"--ragged-quality {kl:g}"
    if options.ratio is not None:
        raise RaggedConfigError(f"{flag} chooses the ratio, so --ragged-ratio has no effect; remove one of them")
    if options.slab_dtype != AUTO or options.fit != FITTED:
        raise RaggedConfigError(
            f"{flag} holds for formats and fit as auto picks them; remove --ragged-slab-dtype and --ragged-fit, or "
            f"give --ragged-ratio"
        )
    wide = against(CODES, start)
    if wide is not None:
        raise RaggedConfigError(f"{flag} holds for slabs in codes, and {wide.why}; give --ragged-ratio")
    # The profile is the same at every ratio below 1.
    _, profile = settle_profile(options, start.view, start.geometry, STEP)
    if isinstance(profile, Uniform) or is_missing(profile):
        raise RaggedConfigError(
            f"{flag} needs a profile whose quality was measured, and there is none ({profile}); start once with "
            f"--ragged-ratio, which calibrates, or give --ragged-profile FILE"
        )
    command = f"python -m calib quality {profile.path} --model {start.view.model_path}"
    rows = load_profile(profile.path).quality
    if not rows:
        raise RaggedConfigError(f"{flag}: nothing was measured for profile {profile.path}; run {command}")
    found = least_ratio(rows, kl)
    if found is None:
        raise RaggedConfigError(
            f"{flag}: the best that was measured is {rows[0].kl:.2g}, at ratio {rows[0].ratio:g}; measure higher "
            f"ratios with {command} --ratios R"
        )
    return min(math.ceil(round(found / STEP, 6)) * STEP, 1.0)

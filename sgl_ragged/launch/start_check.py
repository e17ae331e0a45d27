"""Decide whether a server compares its answers with the uncompressed model's before it reports healthy."""

from __future__ import annotations

from pathlib import Path

from sgl_ragged.contract_checks import installed_release, is_tested
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.conflicts import CHECKED, against
from sgl_ragged.launch.options import CHECKS
from sgl_ragged.launch.plan import ServingPlan, StartCheck
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.profiles.profile import load_profile

_, OFF, STRICT = CHECKS


def choose_check(start: ModelStart, plan: ServingPlan) -> StartCheck | str:
    """Return the check, or why there is none.

    Raises:
        RaggedConfigError: --ragged-check strict was given, and there can be none.
    """
    if start.view.node_rank > 0:
        # It has no HTTP server, and may not have the profile's file.
        return "the first node does that"
    options, why = start.options, _why_not(start, plan)
    if why is None:
        # What an untested release computes is not known, so its answers must be near.
        required = options.check == STRICT
        strict = required or not is_tested(installed_release())
        return StartCheck(Path(plan.profile), strict, required, options.check_seconds)
    if options.check == STRICT:
        raise RaggedConfigError(f"--ragged-check strict cannot be honoured: {why}; use --ragged-check auto")
    return why


def _why_not(start: ModelStart, plan: ServingPlan) -> str | None:
    options, conflict = start.options, against(CHECKED, start)
    if options.check == OFF:
        return "--ragged-check off"
    if not options.from_command_line:
        return "only servers that are started from the command line run it"
    if conflict is not None:
        return f"{conflict.other}: {conflict.why}; {conflict.advice}"
    if start.view.tokenizer_worker_num > 1:
        return "--tokenizer-worker-num is above 1"
    if not Path(plan.profile).is_absolute():
        return f"the profile is {plan.profile}, which has no reference of the uncompressed model"
    if not load_profile(plan.profile).reference:
        return f"profile {plan.profile} has no reference of the uncompressed model; calibrate again to record one"
    return None

"""The plan of a start: made by its launcher; with several nodes, by the first one's for all of them."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import fields
from pathlib import Path

from sgl_ragged.attention.kernel_choice import PREFILL_IN_TORCH
from sgl_ragged.attention.kernels.tiles import check_shape
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.calibrating import calibrate_if_missing, is_missing, settle_profile
from sgl_ragged.launch.conflicts import CODES, against
from sgl_ragged.launch.conflicts import FITTED as FITTED_SLABS
from sgl_ragged.launch.joining import join_features
from sgl_ragged.launch.models import pipeline_stages
from sgl_ragged.launch.multimodal import refuse_positions
from sgl_ragged.launch.node_plan import OF_FIRST_NODE, Choices, Decided, introduce
from sgl_ragged.launch.nodes import Nodes, NodesDiffer, meeting
from sgl_ragged.launch.options import FITTED
from sgl_ragged.launch.placing import place_heads, take_placement
from sgl_ragged.launch.plan import BudgetChoice, ServingPlan, choose_budgets, kept_share, make_plan, refuse_ranks
from sgl_ragged.launch.quality_choice import ratio_by_quality
from sgl_ragged.launch.start import BudgetedStart, ModelStart
from sgl_ragged.mem_pool.slab_format import Share, settle_share
from sgl_ragged.profiles.profile_choice import CachedProfile, ProfileFile, ReadableProfile, Uniform

logger = logging.getLogger(__name__)

_MEET_WITHIN_S = 1800
"""As long as torch waits for ranks; --dist-timeout where it is given."""


def decide(start: ModelStart, choices: Choices) -> ServingPlan:
    """Return the plan that all ranks of all nodes follow; calibrate the model first where it has no profile yet.

    With several nodes, their launchers meet here, and from then on this process ends when any of them ends.

    Raises:
        RaggedConfigError: something cannot be honoured, here or on another node, or nodes differ.
    """
    view = start.view
    if view.nnodes == 1:
        return _make_here(start, choices)[0]
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress.parse(view.dist_init_addr)
    own = introduce(start, choices)
    with meeting(own, (address.host, address.port), view.nnodes, view.dist_timeout or _MEET_WITHIN_S) as nodes:
        if own.number == 0:
            plan, decided = _make_here(start, choices, nodes)
            nodes.tell(*decided.message())
            digests = {name: message["digest"] for name, (message, _) in nodes.hear().items()}
            for name, digest in digests.items():
                if digest != plan.digest:
                    raise NodesDiffer(
                        f"{name} makes another plan ({digest}) of the same choices than {own.name} ({plan.digest}): "
                        f"give all nodes the same flags and the same hardware"
                    )
            nodes.tell({"agreed": True})
            return plan
        ((message, files),) = nodes.hear().values()
        plan = _make_as_decided(start, choices, Decided.from_message(message, files))
        nodes.tell({"digest": plan.digest})
        nodes.hear()
        logger.info("the plan is the first node's; digest %s", plan.digest)
        return plan


def decide_without_calibrating(start: ModelStart, choices: Choices) -> ServingPlan:
    """Return the plan of a start on one node, as `decide` makes it where the model's profile is cached.

    Where it is still to be calibrated, heads have equal budgets of the same ratio, without the scorer's tensors; the
    plan's `source` says so.

    Raises:
        RaggedConfigError: as `decide`.
    """
    tokens = _tokens(start, choices.share)
    scorer, profile = settle_profile(start.options, start.view, start.geometry, tokens)
    _check(start, choices.kernel, scorer)
    missing = is_missing(profile)
    readable: ReadableProfile
    if isinstance(profile, CachedProfile):
        why = f"no profile of {start.view.model_path} is cached, so its first start calibrates {scorer}; assumed here"
        readable = Uniform(why) if missing else profile.file
    else:
        readable = profile
    budgeted = _with_budgets(start, readable, scorer, tokens)
    return _make(budgeted, choices, scorer, str(profile), tokens, statistics=not missing)


def _make_here(start: ModelStart, choices: Choices, nodes: Nodes | None = None) -> tuple[ServingPlan, Decided]:
    """Return the plan, and what other nodes make it from.

    Args:
        nodes: those that wait for the plan; they are told if calibration delays it.
    """
    options, view = start.options, start.view
    tokens = _tokens(start, choices.share)
    scorer, profile = settle_profile(options, view, start.geometry, tokens)
    _check(start, choices.kernel, scorer)
    if nodes is not None and is_missing(profile):
        nodes.tell({"waiting": f"{nodes.own.name} calibrates {view.model_path}, once; the other nodes wait for it"})
    readable = calibrate_if_missing(scorer, profile, options, view, start.geometry, choices.share.ratio)
    budgeted = _with_budgets(start, readable, scorer, tokens)
    plan, chosen = _make(budgeted, choices, scorer, str(profile), tokens), budgeted.chosen
    named = {
        "ragged_profile": readable.path if isinstance(readable, ProfileFile) else None,
        "ragged_scorer_weights": options.scorer_weights,
    }
    files = {} if nodes is None else {name: Path(path).read_bytes() for name, path in named.items() if path is not None}
    return plan, Decided(scorer, str(profile), chosen.source, chosen.kept, plan.placement, files, plan.digest)


def _make_as_decided(start: ModelStart, choices: Choices, decided: Decided) -> ServingPlan:
    """Return the first node's plan, on another node."""
    tokens = _tokens(start, choices.share)
    _check(start, choices.kernel, decided.scorer)
    with tempfile.TemporaryDirectory(prefix="sgl_ragged-") as folder:
        # Workers open no file: what is needed of these is in the plan.
        for name, content in decided.files.items():
            if name not in OF_FIRST_NODE:
                raise RaggedConfigError(f"the first node has sent {name!r}, which is no file of a plan")
            Path(folder, name).write_bytes(content)
        paths = {name: str(Path(folder, name)) for name in decided.files}
        profile: ReadableProfile = Uniform()
        if "ragged_profile" in paths:
            profile = ProfileFile(Path(paths["ragged_profile"]))
        budgeted = _with_budgets(start, profile, decided.scorer, tokens, decided)
        weights = paths.get("ragged_scorer_weights")
        return _make(budgeted, choices, decided.scorer, decided.profile, tokens, weights=weights, decided=decided)


def _with_budgets(
    start: ModelStart, profile: ReadableProfile, scorer: str, tokens: float, decided: Decided | None = None
) -> BudgetedStart:
    """Return the start with budgets of a profile, or with those of the first node."""
    chosen = choose_budgets(start.geometry, profile=profile, scorer=scorer, ratio=tokens, segment=start.options.segment)
    if decided is not None:
        chosen = BudgetChoice(decided.kept, chosen.profile, decided.source)
    return BudgetedStart(**{one.name: getattr(start, one.name) for one in fields(start)}, chosen=chosen)


def _make(
    start: BudgetedStart,
    choices: Choices,
    scorer: str,
    profile: str,
    tokens: float,
    *,
    weights: str | None = None,
    statistics: bool = True,
    decided: Decided | None = None,
) -> ServingPlan:
    """Return the plan with heads placed and features joined.

    Args:
        profile: its name for operators.
        tokens: share of the tokens that heads keep on average.
        weights: the scorer's file on another node than the first; there `decided` is the first node's decision.
        statistics: as in `make_plan`.
    """
    plan = make_plan(
        start.geometry,
        start.chosen,
        ranks=start.view.tp_size,
        ratio=choices.share.ratio,
        segment=start.options.segment,
        scorer=scorer,
        scorer_weights=start.options.scorer_weights if decided is None else weights,
        profile=profile,
        kernel=choices.kernel,
        form=choices.share.form,
        unfitted=why_not_to_fit(start),
        stages=pipeline_stages(start.geometry, start.view.pp_size),
        with_statistics=statistics,
    )

    def place(plan: ServingPlan) -> ServingPlan:
        return place_heads(plan, start) if decided is None else take_placement(plan, decided.placement, start)

    return join_features(plan, start, choices.joining, tokens, place)


def _tokens(start: ModelStart, share: Share) -> float:
    """Share of the tokens that heads keep on average."""
    return kept_share(start.geometry, share.ratio, start.options.segment, share.form, start.kv_dtype.itemsize)


def _check(start: ModelStart, kernel: str, scorer: str) -> None:
    """Raise RaggedConfigError for what the scorer or the kernels cannot serve of this model."""
    refuse_ranks(start.geometry, start.view.tp_size, scorer)
    refuse_positions(start.model.hf_text_config, scorer)
    if kernel not in PREFILL_IN_TORCH:
        check_shape(start.geometry.head_dim, start.geometry.q_per_kv)


def choose_share(start: ModelStart) -> Share:
    """Return ratio and format of slabs. Raises RaggedConfigError for a format that cannot be served here."""
    options, reason = start.options, against(CODES, start)
    ratio = options.ratio if options.quality is None else ratio_by_quality(start, options.quality)
    head_dim, itemsize = start.geometry.head_dim, start.kv_dtype.itemsize
    share = settle_share(options.slab_dtype, ratio, head_dim, itemsize, reason is None)
    if share.form.quantised and reason is not None:
        raise RaggedConfigError(
            f"--ragged-slab-dtype {share.form.name} is not available here: {reason.why}; {reason.advice}"
        )
    return share


def why_not_to_fit(start: ModelStart) -> str | None:
    """Return why kept keys and values must stay as they are with these options and this model, or None."""
    if start.options.fit != FITTED:
        return f"--ragged-fit {start.options.fit}"
    reason = against(FITTED_SLABS, start)
    return None if reason is None else reason.why

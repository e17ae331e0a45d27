"""The plan of a start: made by its launcher; with several nodes, by the first one's for all."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_ragged.attention.kernels.tiles import check_shape
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.calibrating import calibrate_if_missing, is_missing, settle_profile
from sgl_ragged.launch.conflicts import against
from sgl_ragged.launch.feature import Feature
from sgl_ragged.launch.joining import join_features
from sgl_ragged.launch.models import model_geometry, pipeline_stages
from sgl_ragged.launch.multimodal import refuse_positions
from sgl_ragged.launch.node_plan import OF_FIRST_NODE, Decided, introduce
from sgl_ragged.launch.nodes import Nodes, NodesDiffer, meeting
from sgl_ragged.launch.options import FITTED
from sgl_ragged.launch.placing import place_heads, take_placement
from sgl_ragged.launch.plan import ServingPlan, choose_budgets, kept_share, make_plan, refuse_ranks
from sgl_ragged.launch.start import CODES, Launch
from sgl_ragged.launch.start import FITTED as FITTED_SLABS
from sgl_ragged.mem_pool.slab_format import Share, settle_share
from sgl_ragged.profiles.profile_choice import CachedProfile, ProfileFile, ReadableProfile, Uniform

logger = logging.getLogger(__name__)

_MEET_WITHIN_S = 1800
"""As long as torch waits for ranks; --dist-timeout where it is given."""


def decide(launch: Launch, kernel: str, share: Share, joining: Mapping[Feature, Any]) -> ServingPlan:
    """The plan that all ranks of all nodes follow; calibrates the model first where it has no profile yet.

    With several nodes, their launchers meet here, and this process ends with any of them from then on.

    Args:
        launch: with the model. joining: features and their settings.

    Raises:
        RaggedConfigError: something cannot be honoured, here or on another node, or nodes differ.
    """
    view = launch.view
    if view.nnodes == 1:
        return _make_here(launch, kernel, share, joining, None)[0]
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress.parse(view.dist_init_addr)
    own = introduce(launch, kernel, share, joining)
    with meeting(own, (address.host, address.port), view.nnodes, view.dist_timeout or _MEET_WITHIN_S) as nodes:
        if own.number == 0:
            plan, decided = _make_here(launch, kernel, share, joining, nodes)
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
        plan = _make_as_decided(launch, kernel, share, joining, Decided.from_message(message, files))
        nodes.tell({"digest": plan.digest})
        nodes.hear()
        logger.info("the plan is the first node's; digest %s", plan.digest)
        return plan


def _make_here(
    launch: Launch, kernel: str, share: Share, joining: Mapping[Feature, Any], nodes: Nodes | None
) -> tuple[ServingPlan, Decided]:
    """The plan, and what others make it from; `nodes`: those that wait for it, who are told if that takes long."""
    options, view, geometry = launch.options, launch.view, model_geometry(launch.model)
    tokens = _tokens(launch, share)
    scorer, profile = settle_profile(options, view, geometry, tokens)
    _check(launch, kernel, scorer)
    if nodes is not None and is_missing(profile):
        nodes.tell({"waiting": f"{nodes.own.name} calibrates {view.model_path}, once; the other nodes wait for it"})
    readable = calibrate_if_missing(scorer, profile, options, view, geometry)
    chosen = choose_budgets(geometry, profile=readable, scorer=scorer, ratio=tokens, segment=options.segment)
    plan = _make(replace(launch, chosen=chosen), kernel, share, scorer, str(profile), options.scorer_weights)
    plan = _joined(plan, replace(launch, chosen=chosen), joining, tokens, view)
    named = {
        "ragged_profile": readable.path if isinstance(readable, ProfileFile) else None,
        "ragged_scorer_weights": options.scorer_weights,
    }
    files = {} if nodes is None else {name: Path(path).read_bytes() for name, path in named.items() if path is not None}
    return plan, Decided(scorer, str(profile), chosen.source, chosen.kept, plan.placement, files, plan.digest)


def decide_without_calibrating(
    launch: Launch, kernel: str, share: Share, joining: Mapping[Feature, Any]
) -> ServingPlan:
    """The plan of a start on one node, as `decide` makes it where the model's profile is cached.

    Where it is still to be calibrated, heads have equal budgets of the same ratio, without the scorer's tensors; the
    plan's `source` says so.

    Args:
        launch: without `view`, by which features see that nothing is served; `server_args` holds the settings.

    Raises:
        RaggedConfigError: as `decide`.
    """
    options, view, geometry = launch.options, launch.server_args, model_geometry(launch.model)
    tokens = _tokens(launch, share)
    scorer, profile = settle_profile(options, view, geometry, tokens)
    _check(replace(launch, view=view), kernel, scorer)
    missing = is_missing(profile)
    readable: ReadableProfile
    if isinstance(profile, CachedProfile):
        why = f"no profile of {view.model_path} is cached, so its first start calibrates {scorer}; assumed here"
        readable = Uniform(why) if missing else profile.file
    else:
        readable = profile
    chosen = choose_budgets(geometry, profile=readable, scorer=scorer, ratio=tokens, segment=options.segment)
    launch = replace(launch, chosen=chosen)
    resolved = replace(launch, view=view)
    plan = _make(resolved, kernel, share, scorer, str(profile), options.scorer_weights, statistics=not missing)
    return _joined(plan, launch, joining, tokens, view)


def _joined(plan: ServingPlan, launch: Launch, joining: Mapping[Feature, Any], tokens: float, view: Any) -> ServingPlan:
    """The plan with heads placed and features joined.

    Args:
        tokens: share of the tokens that heads keep on average.
        view: SGLang's settings.
    """
    return join_features(
        plan, launch, joining, tokens, lambda plan: place_heads(plan, launch.options, view, launch.model)
    )


def _make_as_decided(
    launch: Launch, kernel: str, share: Share, joining: Mapping[Feature, Any], decided: Decided
) -> ServingPlan:
    """The first node's plan, on another node."""
    options, view, geometry = launch.options, launch.view, model_geometry(launch.model)
    tokens = _tokens(launch, share)
    _check(launch, kernel, decided.scorer)
    with tempfile.TemporaryDirectory(prefix="sgl_ragged-") as folder:
        # Workers open no file: what is needed of these is in the plan.
        for name, content in decided.files.items():
            if name not in OF_FIRST_NODE:
                raise RaggedConfigError(f"the first node has sent {name!r}, which nobody asked for")
            Path(folder, name).write_bytes(content)
        paths = {name: str(Path(folder, name)) for name in decided.files}
        profile: ReadableProfile = Uniform()
        if "ragged_profile" in paths:
            profile = ProfileFile(Path(paths["ragged_profile"]))
        chosen = choose_budgets(geometry, profile=profile, scorer=decided.scorer, ratio=tokens, segment=options.segment)
        launch = replace(launch, chosen=replace(chosen, kept=decided.kept, source=decided.source))
        plan = _make(launch, kernel, share, decided.scorer, decided.profile, paths.get("ragged_scorer_weights"))
    return join_features(
        plan, launch, joining, tokens, lambda plan: take_placement(plan, decided.placement, options, view, launch.model)
    )


def _tokens(launch: Launch, share: Share) -> float:
    """Share of the tokens that heads keep on average."""
    assert launch.kv_dtype is not None, "the model is known"
    geometry = model_geometry(launch.model)
    return kept_share(geometry, share.ratio, launch.options.segment, share.form, launch.kv_dtype.itemsize)


def _check(launch: Launch, kernel: str, scorer: str) -> None:
    """Raise RaggedConfigError for what the scorer or the kernels cannot serve of this model."""
    geometry = model_geometry(launch.model)
    refuse_ranks(geometry, launch.view.tp_size, scorer)
    refuse_positions(launch.model.hf_text_config, scorer)
    if kernel != "torch":
        check_shape(geometry.head_dim, geometry.q_per_kv)


def _make(
    launch: Launch,
    kernel: str,
    share: Share,
    scorer: str,
    profile: str,
    weights: str | None,
    statistics: bool = True,
) -> ServingPlan:
    """The plan without placement and features; weights: the scorer's file. statistics: as in `make_plan`."""
    assert launch.chosen is not None, "budgets are chosen"
    return make_plan(
        model_geometry(launch.model),
        launch.chosen,
        ranks=launch.view.tp_size,
        ratio=share.ratio,
        segment=launch.options.segment,
        scorer=scorer,
        scorer_weights=weights,
        profile=profile,
        kernel=kernel,
        form=share.form,
        unfitted=why_not_to_fit(launch),
        stages=pipeline_stages(model_geometry(launch.model), launch.view.pp_size),
        with_statistics=statistics,
    )


def choose_share(launch: Launch, head_dim: int) -> Share:
    """Share and format of slabs; raises RaggedConfigError for what does not go with the format that was asked for."""
    options, reason = launch.options, against(CODES, launch)
    assert launch.kv_dtype is not None, "the model is known"
    itemsize = launch.kv_dtype.itemsize
    share = settle_share(options.slab_dtype, options.ratio, head_dim, itemsize, options.segment, reason is None)
    if share.form.quantised and reason is not None:
        raise RaggedConfigError(
            f"--ragged-slab-dtype {share.form.name} is not available here: {reason.why}; {reason.advice}"
        )
    return share


def why_not_to_fit(launch: Launch) -> str | None:
    """Why what heads keep must stay as it is with these options and this model; None if they leave that open."""
    if launch.options.fit != FITTED:
        return f"--ragged-fit {launch.options.fit}"
    reason = against(FITTED_SLABS, launch)
    return None if reason is None else reason.why

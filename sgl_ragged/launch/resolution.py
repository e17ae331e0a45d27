"""Resolve a start with --kv-pool ragged: settings of SGLang that follow from it, checks, and the plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.attention.kernel_choice import check_cache, choose_kernel, device_capability
from sgl_ragged.contract_checks import check_contract, warn_if_untested, wrap
from sgl_ragged.errors import TO_COMMAND_LINE, TO_ENGINE, RaggedConfigError
from sgl_ragged.launch.checks import (
    refuse_bytes,
    refuse_environment,
    refuse_flags,
    refuse_port,
    refuse_segment,
    refuse_small,
    refuse_unbound_ranks,
)
from sgl_ragged.launch.conflicts import refuse_conflicts
from sgl_ragged.launch.cuda_graphs import declared_graphs, settled_graphs
from sgl_ragged.launch.decide import choose_share, decide
from sgl_ragged.launch.joining import refuse_flags_without_effect, settle_features
from sgl_ragged.launch.models import expected_kv_dtype, model_geometry, refuse_kv_scheme, refuse_model
from sgl_ragged.launch.node_plan import Choices
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.placing import model_overrides, require_places
from sgl_ragged.launch.plan import ATTRIBUTE, BACKEND, WARM_UP, StartCheck, WorkerSettings
from sgl_ragged.launch.start import ModelStart, Start
from sgl_ragged.launch.start_check import choose_check
from sgl_ragged.mem_pool.kv_dtype import is_fp8

WINDOWS_BACKEND = "triton"
"""Attention backend of sliding-window layers; on CPUs torch with the same masks."""


def resolve_with_options(original: Callable[[Any], None], server_args: Any, options: RaggedOptions) -> None:
    """Run SGLang's own resolution with the plugin's settings declared, check its results, and decide the plan.

    The options on `server_args` become the `WorkerSettings` that workers follow.

    Raises:
        RaggedConfigError: the combination cannot be honoured; nothing has been started yet.
    """
    serving = WorkerSettings(
        None, options.kv_bytes, options.from_command_line, options.observer, options.scorer_weights
    )
    if not options.ragged:
        check_contract(sglang.KV_BYTES)
        warn_if_untested([sglang.KV_BYTES])
        original(server_args)
        setattr(server_args, ATTRIBUTE, serving)
        return
    check_contract(sglang.SERVING)

    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    start = Start(options, server_args)
    refuse_environment(server_args)
    refuse_flags(server_args, options)
    refuse_flags_without_effect(start)
    refuse_conflicts(start)
    _hook_launcher()
    joining = settle_features(start)
    trees = [feature.radix_cache for feature in joining if feature.radix_cache is not None]
    declare_resolution(
        server_args,
        "sgl_ragged",
        page_size=options.segment,
        attention_backend=BACKEND,
        **declared_graphs(server_args, options),
        **({"radix_cache_backend": trees[0]} if trees else {}),
    )
    original(server_args)
    view = resolving_view(server_args)
    kernel = choose_kernel(options.kernel, view.device)
    captured = kernel == "triton" and view.device == "cuda"
    graphs = settled_graphs(view.cuda_graph_config, server_args, captured=captured)
    declare_resolution(server_args, "sgl_ragged", cuda_graph_config=graphs)
    chunk = view.chunked_prefill_size
    if chunk > 0:
        whole_segments = max(chunk // options.segment, 1) * options.segment
        declare_resolution(server_args, "sgl_ragged", chunked_prefill_size=whole_segments)
    for name, wanted in (("attention_backend", BACKEND), ("page_size", options.segment)):
        found = getattr(view, name)
        if found != wanted:
            raise RaggedConfigError(
                f"SGLang set {name} to {found!r} for this model or flag combination, but --kv-pool ragged needs "
                f"{wanted!r}"
            )
    with_model = _with_model(start, view)
    if is_fp8(with_model.kv_dtype):
        check_cache(kernel, with_model.kv_dtype, device_capability(view.device))
    refuse_conflicts(with_model)
    joining |= settle_features(with_model, known=joining)
    warn_if_untested([sglang.SERVING, *(feature.contract for feature in joining)])
    for feature, settings in joining.items():
        declare_resolution(server_args, "sgl_ragged", **feature.sglang_settings(settings, with_model))
    # A feature may have changed what SGLang makes of the model.
    with_model = replace(with_model, model=model_config_of(server_args))
    share = choose_share(with_model)
    refuse_unbound_ranks(view)
    if options.from_command_line:
        refuse_port(view)
    if options.kv_bytes is not None:
        refuse_bytes(options.kv_bytes, view)
    plan = decide(with_model, Choices(kernel, share, joining))
    if options.kv_bytes is not None:
        refuse_small(options.kv_bytes, plan, with_model)
    check = choose_check(with_model, plan)
    if isinstance(check, StartCheck):
        check_contract(sglang.START_CHECK)
        declare_resolution(server_args, "sgl_ragged", warmups=",".join(filter(None, (view.warmups, WARM_UP))))
    setattr(server_args, ATTRIBUTE, replace(serving, plan=plan, check=check))
    overrides = model_overrides(plan, view.json_model_override_args)
    if overrides is not None:
        declare_resolution(server_args, "sgl_ragged", json_model_override_args=overrides)
        # SGLang has cached the config without the overrides; the next access builds it with them.
        server_args._model_config = None
        require_places(plan, model_geometry(model_config_of(server_args)))


def _with_model(start: Start, view: Any) -> ModelStart:
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(start.server_args)
    return ModelStart(start.options, start.server_args, view, model, expected_kv_dtype(model, view.kv_cache_dtype))


@functools.cache
def _hook_launcher() -> None:
    """Check the model before SGLang does, and report workers that died at start; once per process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    # The step in which SGLang asks models for attention backends by name; it has read the config before.
    register_resolution_hook("handle_model_specific_adjustments")(_refuse_model_first)
    wrap([(sglang.DEAD_WORKER, answer_dead_worker)])


def _refuse_model_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    options, view = getattr(server_args, ATTRIBUTE, None), resolving_view(server_args)
    if isinstance(options, RaggedOptions) and options.ragged:
        refuse_segment(options.segment, view.device)
        refuse_model(model_config_of(server_args))
        refuse_kv_scheme(model_config_of(server_args), view.kv_cache_dtype)
        start = _with_model(Start(options, server_args), view)
        if start.geometry.windowed is not None:
            # SGLang serves some of these models with named backends alone.
            declare_resolution(server_args, "sgl_ragged", attention_backend=WINDOWS_BACKEND)
            previous(server_args)
            declare_resolution(server_args, "sgl_ragged", attention_backend=BACKEND)
            return
    previous(server_args)


def answer_dead_worker(original: Callable, rank: int, process: Any) -> Exception:
    """Replace SGLang's error for a worker that died at start: if the worker printed why, the launcher just ends."""
    error = original(rank, process)
    if process.exitcode == TO_COMMAND_LINE:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)
        # No SystemExit: on its way out the interpreter would wait for sockets whose other ends are gone.
        os._exit(1)
    if process.exitcode == TO_ENGINE:
        return RaggedConfigError("a worker refused to serve; the line above that starts with sgl_ragged says why")
    return error

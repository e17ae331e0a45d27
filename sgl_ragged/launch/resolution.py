"""Settings that follow from --kv-pool ragged, and the reasons to refuse it. Runs in the launcher."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sgl_ragged.attention.kernel_choice import check_cache, choose_kernel, device_capability
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.checks import refuse_bytes, refuse_port, refuse_small, refuse_unbound_ranks
from sgl_ragged.launch.conflicts import refuse_conflicts
from sgl_ragged.launch.cuda_graphs import captures_prefill, declared_graphs, refuse_graphs, settled_graphs
from sgl_ragged.launch.decide import choose_share, decide
from sgl_ragged.launch.feature import features
from sgl_ragged.launch.joining import refuse_in_vain, settle_features
from sgl_ragged.launch.models import (
    NAMED_KV_DTYPES,
    expected_kv_dtype,
    model_geometry,
    refuse_kv_scheme,
    refuse_model,
)
from sgl_ragged.launch.options import ATTRIBUTE, RaggedOptions
from sgl_ragged.launch.start import Launch
from sgl_ragged.mem_pool.kv_dtype import is_fp8
from sgl_ragged.mem_pool.sizing import check_limits
from sgl_ragged.serve.hooks import BACKEND, DEAD_WORKER, check_seams, hook_launcher, seams_for

logger = logging.getLogger(__name__)


def resolve_with_options(original: Callable[[Any], None], server_args: Any, options: RaggedOptions) -> None:
    """Run SGLang's own resolution with the plugin's settings declared, check what came out, place the heads.

    The options that the workers are to follow replace those on the record.

    Raises:
        RaggedConfigError: the combination cannot be honoured; nothing has been started yet.
    """
    check_seams(seams_for(options))
    if not options.ragged:
        return original(server_args)

    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    launch = Launch(options, server_args)
    refuse_environment(server_args)
    refuse_flags(server_args, options)
    refuse_in_vain(launch)
    refuse_conflicts(launch)
    _hook_launcher()
    joining = settle_features(launch)
    trees = [feature.radix_cache[0] for feature in joining if feature.radix_cache is not None]
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
        declare_resolution(
            server_args, "sgl_ragged", chunked_prefill_size=max(chunk // options.segment, 1) * options.segment
        )
    for name, wanted in (("attention_backend", BACKEND), ("page_size", options.segment)):
        found = getattr(view, name)
        if found != wanted:
            raise RaggedConfigError(
                f"SGLang set {name} to {found!r} for this model or flag combination, but --kv-pool ragged needs "
                f"{wanted!r}"
            )
    model_config = model_config_of(server_args)
    kv_dtype = expected_kv_dtype(model_config, view.kv_cache_dtype)
    if is_fp8(kv_dtype):
        check_cache(kernel, kv_dtype, device_capability(view.device))
    launch = Launch(options, server_args, model_config, kv_dtype, view)
    refuse_conflicts(launch)
    joining |= settle_features(launch, known=joining)
    for feature, settings in joining.items():
        declare_resolution(server_args, "sgl_ragged", **feature.declare(settings, launch))
    # A feature may have changed what SGLang makes of the model.
    model_config = model_config_of(server_args)
    launch = replace(launch, model=model_config)
    share = choose_share(launch, model_geometry(model_config).head_dim)
    refuse_unbound_ranks(view)
    if options.from_command_line:
        refuse_port(view)
    if options.kv_bytes is not None:
        refuse_bytes(options.kv_bytes, view)
    plan = decide(launch, kernel, share, joining)
    if options.kv_bytes is not None:
        refuse_small(options.kv_bytes, plan, kv_dtype, model_config, view)
    setattr(server_args, ATTRIBUTE, replace(options, plan=plan))
    from sgl_ragged.launch.placing import model_overrides, require_places

    overrides = model_overrides(plan, view.json_model_override_args)
    if overrides is not None:
        declare_resolution(server_args, "sgl_ragged", json_model_override_args=overrides)
        # The config that was built without them; whoever asks next builds it anew.
        server_args._model_config = None
        require_places(plan, model_geometry(model_config_of(server_args)))


@functools.cache
def _hook_launcher() -> None:
    """Check the model before SGLang does, and report workers that died at start; once per process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sgl_ragged.serve.refusal import answer_dead_worker

    # The step in which SGLang asks models for attention backends by name; it has read the config before.
    register_resolution_hook("handle_model_specific_adjustments")(_refuse_model_first)
    hook_launcher(DEAD_WORKER, answer_dead_worker)


def _refuse_model_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    options, view = getattr(server_args, ATTRIBUTE, None), resolving_view(server_args)
    if options is not None and options.ragged:
        refuse_segment(options.segment, view.device)
        refuse_model(model_config_of(server_args))
        refuse_kv_scheme(model_config_of(server_args), view.kv_cache_dtype)
        launch = Launch(options, server_args, model_config_of(server_args), view=view)
        backend = next((one.known_backend for one in features() if one.known_backend and one.asked(launch)), None)
        if backend is not None:
            declare_resolution(server_args, "sgl_ragged", attention_backend=backend)
            previous(server_args)
            declare_resolution(server_args, "sgl_ragged", attention_backend=BACKEND)
            return
    previous(server_args)


def refuse_segment(segment: int, device: str) -> None:
    """Raise RaggedConfigError for a segment length that SGLang's allocator on this device cannot use as page size."""
    if device == "cuda" and segment & (segment - 1):
        raise RaggedConfigError(
            f"--ragged-segment {segment} is no power of two, which SGLang's page allocator needs on CUDA; "
            f"use {1 << segment.bit_length() - 1} or {1 << segment.bit_length()}"
        )


def refuse_environment(server_args: Any) -> None:
    """Raise RaggedConfigError for environment variables of SGLang that do not go with --kv-pool ragged, and warn of one
    that is in vain."""
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise RaggedConfigError(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH captures what runs before a decode step, and --kv-pool ragged seals "
            "segments there, on the host's word; unset it"
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() and not captures_prefill(server_args):
        logger.warning(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING does nothing with --kv-pool ragged: prefill is not captured, so "
            "SGLang leaves room for it, and the pool is that much smaller than the token pool; say --kv-bytes or "
            "--mem-fraction-static for another size"
        )


_FORBIDDEN_FLAGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # field, values that are fine, reason
    ("attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop --attention-backend"),
    ("prefill_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    ("decode_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    (
        "hicache_host_memory_mode",
        ("cache",),
        "host memory as a mere buffer in front of storage is not supported with --kv-pool ragged; drop the flag",
    ),
    (
        "enable_unified_cache_external_linker",
        (False,),
        "external linkers read single tokens, which --kv-pool ragged does not store; use --enable-hierarchical-cache",
    ),
    ("enable_lmcache", (False,), "LMCache is not supported with --kv-pool ragged"),
    ("enable_flexkv", (False,), "FlexKV is not supported with --kv-pool ragged"),
    ("enable_memory_saver", (False,), "releasing KV memory at run time is not supported with --kv-pool ragged"),
    ("kv_canary", (None, "none"), "the KV canary reads single tokens, which --kv-pool ragged does not store"),
    ("enable_unified_memory", (False,), "the unified memory pool is not supported with --kv-pool ragged"),
    ("enable_page_major_kv_layout", (False,), "the page-major layout is not supported with --kv-pool ragged"),
    ("enable_streaming_session", (False,), "streaming sessions are not supported with --kv-pool ragged"),
    ("enable_hisparse", (False,), "HiSparse is not supported with --kv-pool ragged"),
    ("enable_kv_cache_sharding", (False,), "KV cache sharding is not supported with --kv-pool ragged"),
    ("enable_two_batch_overlap", (False,), "two-batch overlap is not supported with --kv-pool ragged"),
    ("enable_pdmux", (False,), "PD multiplexing is not supported with --kv-pool ragged"),
    ("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache leaves no KV cache to compress"),
    ("dcp_size", (1,), "decode context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_cp_size", (1,), "context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_dp_size", (None, 1), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("enable_dp_attention", (False,), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("enable_torch_compile", (False,), "torch.compile is not supported with --kv-pool ragged; drop it"),
    (
        "enable_deterministic_inference",
        (False,),
        "deterministic inference needs one of SGLang's own attention backends; drop it, or use --kv-pool token",
    ),
    (
        "rl_on_policy_target",
        (None,),
        "deterministic inference needs one of SGLang's own attention backends; drop it, or use --kv-pool token",
    ),
    (
        "enable_mis",
        (False,),
        "multi-item scoring needs attention masks of its own, which --kv-pool ragged does not have; drop it",
    ),
    ("dllm_algorithm", (None,), "diffusion language models are not supported with --kv-pool ragged"),
    (
        "kv_cache_dtype",
        ("auto", *NAMED_KV_DTYPES),
        "of quantised KV caches --kv-pool ragged supports FP8; use --kv-cache-dtype fp8_e4m3, fp8_e5m2 or auto",
    ),
)


def refuse_flags(server_args: Any, options: RaggedOptions) -> None:
    """Raise RaggedConfigError for the first SGLang flag that does not go with --kv-pool ragged."""
    if server_args.page_size not in (None, options.segment):
        raise RaggedConfigError(
            f"--page-size {server_args.page_size} differs from the segment length {options.segment}: a page is a "
            f"segment; drop --page-size, or set --ragged-segment"
        )
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % options.segment:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} is not a multiple of the segment length {options.segment}: "
            f"set it to {max(chunk // options.segment, 1) * options.segment}, or drop it"
        )
    check_limits(options.segment, server_args.max_running_requests, server_args.max_total_tokens)
    if server_args.nnodes > 1 and not server_args.dist_init_addr:
        raise RaggedConfigError(
            f"--nnodes {server_args.nnodes} needs an address of the first node: give all nodes the same "
            f"--dist-init-addr HOST:PORT"
        )
    refuse_graphs(server_args, options)
    for name, fine, reason in _FORBIDDEN_FLAGS:
        value = getattr(server_args, name, fine[0])
        if value not in fine:
            raise RaggedConfigError(f"{reason} ({name} is {value!r})")
